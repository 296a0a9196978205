// The reader of Python's pickles: any bytes are a list of tensors or a FileError.

#include "semitone/core/error.h"
#include "src/weights/named_tensors.h"
#include "src/weights/pickle.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace semitone;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  weights::PickleReader pickle(text, "the input");
  try {
    const weights::Value& root = pickle.read();
    for (const bool nested : {false, true}) {
      try {
        weights::find_tensors(root, nested ? "state_dict" : "", nested, "the input");
      } catch (const FileError&) {
      }
    }
    while (pickle.position() < text.size()) pickle.read();
  } catch (const FileError&) {
  }
  return 0;
}

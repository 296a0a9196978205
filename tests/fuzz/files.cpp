// Parsers of files.

#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "semitone/zoo/idx.h"
#include "semitone/zoo/text.h"
#include "src/autocast/policy_text.h"
#include "src/checkpoint/archive_code.h"
#include "src/checkpoint/manifest.h"
#include "src/core/checksum.h"
#include "src/report/metrics_file.h"
#include "src/report/report_json.h"
#include "src/report/report_text.h"
#include "src/report/samples_file.h"
#include "src/report/summary.h"
#include "src/report/verdicts.h"
#include "src/weights/input_file.h"
#include "src/weights/named_tensors.h"
#include "src/weights/pickle.h"
#include "src/weights/safetensors.h"
#include "src/weights/zip_archive.h"
#include "src/zoo/cifar_files.h"
#include "src/zoo/image.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/require.h"
#include "tests/fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::fuzz {

const std::string& memory_file(std::string_view content) {
  static const int file = ::memfd_create("input", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 ||
      ::pwrite(file, content.data(), content.size(), 0) != static_cast<ssize_t>(content.size()))
    throw std::runtime_error("no file in memory");
  return path;
}

namespace {

void read_images(std::string_view input, const std::vector<zoo::CifarLabel>& labels) {
  constexpr std::int64_t kMaxBytes = 1 << 16;
  std::string content(input);
  // Few inputs end with an image: black pixels complete the last one, unless it is gzipped.
  const std::size_t bytes = labels.size() + 3 * 32 * 32;
  if (!input.starts_with('\x1f')) content.resize((input.size() / bytes + 1) * bytes);
  const zoo::ImageSet set =
      zoo::read_cifar({memory_file(content)}, labels, labels.size() - 1, kMaxBytes);
  require(set.size() > 0 && set.labels.numel() == set.size() && set.channels() == 3,
          "a label for each image");
  require(set.labels.max().item<std::int64_t>() < set.classes, "labels of these classes");
}

void read_names(std::string_view input) {
  require(zoo::read_class_names(memory_file(input), 3).size() == 3, "a name for each class");
}

}  // namespace

void cifar(std::string_view input) {
  if (input.empty()) return;
  const std::string_view content = input.substr(1);
  try {  // '0', '1', '2' and so on
    switch (static_cast<unsigned char>(input.front()) % 3) {
      case 0:
        return read_images(content, {{"labels", 10}});
      case 1:
        return read_images(content, {{"coarse labels", 20}, {"fine labels", 100}});
      default:
        return read_names(content);
    }
  } catch (const FileError&) {
  }
}

// What is accepted has no call, no function and no block but classes: nothing that could run.
void code(std::string_view input) {
  if (!checkpoint::has_attributes_only(input)) return;
  static const std::regex harmless(R"("[^"]*"|Tuple\[\(\)\]|\((Module|NamedTuple)\):)");
  const std::string rest = std::regex_replace(std::string(input), harmless, "");
  require(rest.find_first_of("()\"\\\r\t;@#") == std::string::npos, "declarations");
}

void idx(std::string_view input) {
  constexpr std::int64_t kMaxBytes = 1 << 16;
  try {
    zoo::read_idx(memory_file(input), kMaxBytes);
  } catch (const FileError&) {
  }
}

void image(std::string_view input) {
  constexpr std::int64_t kFewPixels = 1 << 12;
  try {
    zoo::decode_image(input, "the input", kFewPixels);
  } catch (const FileError&) {
  }
}

namespace {

// With the checksum that belongs to it: few inputs have theirs.
std::string with_checksum(std::string_view manifest) {
  const std::string start(manifest.substr(0, manifest.find_last_of('}')));
  return start + ",\n \"crc32\": \"" + checksum_of(start + "\n}") + "\"\n}\n";
}

}  // namespace

void manifest(std::string_view input) {
  const std::string text(input);
  for (const std::string& manifest : {text, with_checksum(text)}) {
    try {
      checkpoint::parse_manifest("manifest.json", manifest);
    } catch (const FileError&) {
    }
  }
  try {  // which are not behind a checksum
    checkpoint::to_text(checkpoint::records_from(text));
  } catch (const FileError&) {
  }
}

void pickle(std::string_view input) {
  weights::PickleReader pickle(input, "the input");
  try {
    const weights::Value& root = pickle.read();
    for (const bool nested : {false, true}) {
      try {
        weights::find_tensors(root, nested ? "a.0" : "", nested, "the input");
      } catch (const FileError&) {
      }
    }
    while (pickle.position() < input.size()) pickle.read();
  } catch (const FileError&) {
  }
}

void policy(std::string_view input) {
  std::string text;
  try {
    text = amp::to_text(amp::parse_policy(input, "the input"));
  } catch (const FileError&) {
    return;
  }
  require(amp::to_text(amp::parse_policy(text, "what was written")) == text,
          "a policy to be the same after it was written");
}

void records(std::string_view input) {
  report::ReportedRun run;
  try {
    report::read_samples(memory_file(input), run.run);
  } catch (const FileError&) {
  }
  try {
    report::read_metrics(memory_file(input), {}, run.run);
  } catch (const FileError&) {
  }
  run.summary = report::summarize(run.run);
  run.verdicts = report::verdicts_of(run.run, run.summary);
  report::report_text(run, nullptr);
}

void safetensors(std::string_view input) {
  try {
    weights::read_safetensors(weights::InputFile(memory_file(input)));
  } catch (const FileError&) {
  }
}

void text(std::string_view input) {
  constexpr std::int64_t kMaxBytes = 1 << 16;
  try {
    const zoo::Text text = zoo::load_text(memory_file(input), kMaxBytes);
    text.encode(text.decode(text.tokens));
  } catch (const FileError&) {
  }
}

void weights(std::string_view input) {
  for (const char* const entry : {"", "state_dict"}) {
    try {
      weights::read(memory_file(input), weights::ReadOptions().entry(entry));
    } catch (const FileError&) {
    }
  }
}

void zip(std::string_view input) {
  try {
    const weights::InputFile file(memory_file(input));
    const weights::ZipArchive archive(file);
    for (const auto& [name, record] : archive.records()) archive.text(name, file.size());
  } catch (const FileError&) {
  }
}

}  // namespace semitone::fuzz

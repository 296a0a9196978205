#pragma once

#include <torch/serialize/archive.h>

#include <sstream>

namespace semitone::test {

// The output of write(archive), as read from a file.
template <typename Write>
torch::serialize::InputArchive archived(Write&& write) {
  torch::serialize::OutputArchive out;
  write(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  return in;
}

// The output of a save(archive) const method.
template <typename T>
torch::serialize::InputArchive saved(const T& object) {
  return archived([&](torch::serialize::OutputArchive& archive) { object.save(archive); });
}

}  // namespace semitone::test

#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/scaling/gradients.h"
#include "src/scaling/masters.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace semitone::amp {

// Calls visit(key, pair) for every master, in the order of its first place in the optimizer. This
// differs from the order of pairs_, in which a parameter that was frozen comes later.
template <typename Visit>
void Masters::for_each_place(Visit&& visit) const {
  std::unordered_set<std::size_t> seen;
  for_each_parameter(
      *optimizer_, [&](std::size_t group, std::size_t index, const at::Tensor& place) {
        const auto pair = index_at(place);
        if (!pair.has_value() || !seen.insert(*pair).second) return;
        visit("group" + std::to_string(group) + "_" + std::to_string(index), pairs_[*pair]);
      });
}

void Masters::save(torch::serialize::OutputArchive& archive) const {
  std::int64_t size = 0;  // a parameter may have left the groups
  for_each_place([&](const std::string& key, const Pair& pair) {
    archive.write(key, pair.master.detach());
    ++size;
  });
  archive.write("size", c10::IValue(size));
}

std::vector<at::Tensor> Masters::read(torch::serialize::InputArchive& archive) {
  constexpr auto kComponent = "amp.master_weights.load";
  adopt({});
  const auto saved = read_value<std::int64_t>(archive, "size", kComponent);
  if (saved != static_cast<std::int64_t>(size())) {
    throw FileError(kComponent, std::to_string(size()) + " master weights", std::to_string(saved),
                    "was it saved from the same model and optimizer, at the same opt level, with "
                    "the same layers frozen?");
  }
  std::vector<at::Tensor> values;
  for_each_place([&](const std::string& key, const Pair& pair) {
    values.push_back(read_value<at::Tensor>(archive, key, kComponent));
    if (values.back().sizes() != pair.master.sizes()) {
      throw FileError(kComponent, c10::str("a master weight of shape ", pair.master.sizes()),
                      c10::str(values.back().sizes(), " at ", key),
                      "was it saved from the same model?");
    }
  });
  return values;
}

void Masters::assign(const std::vector<at::Tensor>& values) {
  auto value = values.begin();
  for_each_place([&](const std::string&, const Pair& pair) { set(pair.parameter, *value++); });
}

void Masters::load(torch::serialize::InputArchive& archive) {
  assign(read(archive));
}

}  // namespace semitone::amp

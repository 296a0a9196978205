#include "src/core/nearest.h"

#include <torch/csrc/jit/frontend/edit_distance.h>

#include <algorithm>
#include <utility>

namespace semitone {

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  const std::size_t most = std::max<std::size_t>(2, name.size() / 3);
  const std::string wanted(name);
  std::vector<std::pair<std::size_t, const std::string*>> ranked;
  for (const std::string& candidate : candidates) {
    const std::size_t distance =
        torch::jit::ComputeEditDistance(wanted.c_str(), candidate.c_str(), most);
    if (distance <= most) ranked.emplace_back(distance, &candidate);
  }
  const auto closer = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : *a.second < *b.second;
  };
  const std::size_t count = std::min<std::size_t>(3, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count),
                    ranked.end(), closer);
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += i + 1 == count ? " or " : ", ";
    text.append("'").append(*ranked[i].second).append("'");
  }
  return text;
}

}  // namespace semitone

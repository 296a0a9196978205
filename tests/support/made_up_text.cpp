#include "tests/support/made_up_text.h"

#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string_view>
#include <vector>

namespace semitone::test {
namespace {

constexpr std::string_view kLetters = "abcdefgh";

// The generator's values are the same everywhere, those of the standard's distributions are not.
std::size_t draw(std::mt19937& random, std::size_t below) {
  return random() % below;
}

std::vector<std::string> dictionary() {
  std::mt19937 random(1);
  std::set<std::string> words;
  while (words.size() < kMadeUpWords) {
    std::string word;
    while (word.size() + 1 < kMadeUpWordLength) word += kLetters[draw(random, kLetters.size())];
    words.insert(word);
  }
  return {words.begin(), words.end()};
}

}  // namespace

std::string made_up_text(std::size_t words, unsigned seed) {
  const std::vector<std::string> all = dictionary();
  std::mt19937 random(seed);
  std::string text;
  for (std::size_t i = 0; i < words; ++i) text += all[draw(random, all.size())] + " ";
  return text;
}

zoo::Text read_made_up_text(std::size_t words, unsigned seed) {
  zoo::Text text;
  text.vocabulary = " " + std::string(kLetters);
  text.tokens = text.encode(made_up_text(words, seed));
  return text;
}

double loss_of_pairs(const zoo::Text& text, double test_share) {
  const auto size = static_cast<double>(text.size());
  const std::int64_t train = text.size() - std::llround(size * test_share);
  const at::Tensor pairs = text.tokens.to(torch::kLong).unfold(0, 2, 1);
  const at::Tensor places = pairs.select(1, 0) * text.classes() + pairs.select(1, 1);
  const std::int64_t kinds = text.classes() * text.classes();
  // One more of each, so that none has the probability 0.
  const at::Tensor counts = torch::bincount(places.narrow(0, 0, train - 1), {}, kinds)
                                .view({text.classes(), text.classes()})
                                .to(torch::kDouble) +
                            1;
  const at::Tensor losses = -(counts / counts.sum(1, true)).log().flatten();
  return losses.index_select(0, places.narrow(0, train, places.size(0) - train))
      .mean()
      .item<double>();
}

}  // namespace semitone::test

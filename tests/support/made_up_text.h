#pragma once

#include "semitone/zoo/text.h"

#include <cstddef>
#include <string>

// A synthetic text whose entropy is known.
namespace semitone::test {

// Characters of a word, with the space after it.
inline constexpr std::size_t kMadeUpWordLength = 6;
// 16 different words of five letters, of which there are eight.
inline constexpr std::size_t kMadeUpWords = 16;

// Words that are drawn independently, all with the same probability. Equal on every machine. No model
// can have a loss below ln(16) / 6 = 0.462 nats per character, and one that knows only the character
// before cannot be near it: five letters of eight could be 32768 words.
std::string made_up_text(std::size_t words, unsigned seed);

// The same as zoo::load_text would read it.
zoo::Text read_made_up_text(std::size_t words, unsigned seed);

// The loss on the last tokens of the text, in nats per character, of the best model that knows only
// the character before: the frequencies of pairs of characters in the first tokens.
double loss_of_pairs(const zoo::Text& text, double test_share);

}  // namespace semitone::test

#pragma once

#include "semitone/core/error.h"

#include <stdexcept>

namespace semitone::fuzz {

// A finding unless the parser's result is right.
inline void require(bool right, const char* expected) {
  if (!right) throw std::logic_error(expected);
}

// Runs a parser, which may refuse its input.
template <typename Parse>
void accept_or_refuse(Parse&& parse) {
  try {
    parse();
  } catch (const Error&) {
  }
}

}  // namespace semitone::fuzz

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::zoo {

/// A text as a sequence of numbers, for language models of characters. A character is a byte: one
/// beyond ASCII is several of them in UTF-8.
struct Text {
  at::Tensor tokens;       ///< uint8, (N): for each byte of the text, its place in the vocabulary
  std::string vocabulary;  ///< the bytes that occur, each once, in ascending order; 1 to 256

  std::int64_t size() const { return tokens.defined() ? tokens.size(0) : 0; }
  /// Size of the vocabulary: a model has as many outputs.
  std::int64_t classes() const { return static_cast<std::int64_t>(vocabulary.size()); }

  /// Returns the tokens of a text, uint8, (length). Error if a byte is not in the vocabulary; the
  /// message names the first such byte and its place.
  at::Tensor encode(std::string_view text) const;
  /// Returns the text of tokens: integers on any device, in any shape, read in row-major order.
  /// Error for another dtype, and for a token outside of the vocabulary (the message names the
  /// first).
  std::string decode(const at::Tensor& tokens) const;
};

/// Reads a text file, which may be gzipped. It may have any encoding and any line ends.
///
///     const auto text = zoo::load_text("corpus.txt");
///     // Rows of 65 consecutive tokens, (N - 64, 65), without a copy: row i begins at token i.
///     const auto windows = text.tokens.unfold(0, 65, 1);
///
/// @param max_bytes  largest size of the text; a larger one is an error, for a file that is not
///                   gzipped before it is read. Memory is allocated as the text arrives, since a
///                   gzip stream may be endless.
/// Error for max_bytes below 1. FileError with the path if the file is missing, not a regular file,
/// unreadable, empty, larger than max_bytes, or corrupt or truncated gzip.
Text load_text(const std::filesystem::path& file, std::int64_t max_bytes = std::int64_t{1} << 30);

}  // namespace semitone::zoo

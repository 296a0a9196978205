#pragma once

// Internal interface: other rooms include this header.

#include "semitone/weights/file.h"

#include <filesystem>
#include <optional>

namespace semitone::weights {

// For messages: "a name that ends in " …
inline constexpr auto kFileNames = ".safetensors, .pt, .pth or .bin";

// The format that write() chooses for a file of this name; std::nullopt for other names.
inline std::optional<Format> format_of_name(const std::filesystem::path& path) {
  const auto extension = path.extension();
  if (extension == ".safetensors") return Format::safetensors;
  if (extension == ".pt" || extension == ".pth" || extension == ".bin") return Format::pytorch;
  return std::nullopt;
}

}  // namespace semitone::weights

#pragma once

#include <string>
#include <string_view>

namespace semitone::fuzz {

// Returns the path of a file in memory with this content. The next call replaces it.
const std::string& memory_file(std::string_view content);

}  // namespace semitone::fuzz

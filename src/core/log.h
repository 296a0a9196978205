#pragma once

#include <spdlog/spdlog.h>

#include <memory>

namespace semitone {

// The library's logger, named "semitone" in spdlog's registry: on stderr, level from
// SEMITONE_LOG_LEVEL. A program that registers its own logger of that name before the first use
// takes over.
std::shared_ptr<spdlog::logger> log();

}  // namespace semitone

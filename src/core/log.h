#pragma once

#include <spdlog/spdlog.h>

#include <memory>

namespace semitone {

// The library's logger, named "semitone" in spdlog's registry: on stderr, with the level of
// SEMITONE_LOG_LEVEL. If a program registers its own logger of that name before the first use, that
// one is used.
std::shared_ptr<spdlog::logger> log();

}  // namespace semitone

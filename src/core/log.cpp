#include "src/core/log.h"

#include "src/core/env.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace semitone {
namespace {

std::shared_ptr<spdlog::logger> make_logger() {
  if (auto existing = spdlog::get("semitone")) return existing;
  auto logger = spdlog::stderr_color_mt("semitone");
  logger->set_pattern("%^[%n] %l:%$ %v");
  if (const auto name = env::get(env::kLogLevel)) {
    // from_str returns "off" for an unknown name.
    const auto level = spdlog::level::from_str(*name);
    if (level == spdlog::level::off && *name != "off") {
      logger->warn("expected {} to be trace, debug, info, warning, error or off, got '{}' — info",
                   env::kLogLevel.name, *name);
    } else {
      logger->set_level(level);
    }
  }
  return logger;
}

}  // namespace

std::shared_ptr<spdlog::logger> log() {
  // Never destroyed: objects in static storage may log when they are destroyed.
  static const auto* const logger = new std::shared_ptr<spdlog::logger>(make_logger());
  return *logger;
}

}  // namespace semitone

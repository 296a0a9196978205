#include "src/core/log.h"

#include "semitone/core/env.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace semitone {
namespace {

std::shared_ptr<spdlog::logger> make_logger() {
  if (auto existing = spdlog::get("semitone")) return existing;
  auto logger = spdlog::stderr_color_mt("semitone");
  logger->set_pattern("%^[%n] %l:%$ %v");
  if (const auto level = env::get(env::kLogLevel))
    logger->set_level(spdlog::level::from_str(*level));
  return logger;
}

}  // namespace

std::shared_ptr<spdlog::logger> log() {
  static const std::shared_ptr<spdlog::logger> logger = make_logger();
  return logger;
}

}  // namespace semitone

#pragma once

#include "src/core/log.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::test {

// Captures the library's log during its lifetime.
class CapturedLog {
 public:
  CapturedLog() : logger_(log()) {
    sink_ = std::make_shared<spdlog::sinks::ostream_sink_mt>(stream_);
    before_ = logger_->sinks();
    logger_->sinks() = {sink_};
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;
  ~CapturedLog() { logger_->sinks() = before_; }
  std::string text() const { return stream_.str(); }

 private:
  std::ostringstream stream_;
  std::shared_ptr<spdlog::logger> logger_;
  spdlog::sink_ptr sink_;
  std::vector<spdlog::sink_ptr> before_;
};

}  // namespace semitone::test

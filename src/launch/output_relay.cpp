#include "src/launch/output_relay.h"

#include "src/core/log.h"
#include "src/launch/quiet_thread.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

namespace semitone::launch {
namespace {

constexpr int kLastLines = 20;
// Enough for 20 lines; a line without an end is cut at this length.
constexpr std::size_t kMaxPiece = 1 << 16;
// The size that a pipe accepts in one piece, without blocking once poll() reports that it is
// writable.
constexpr std::size_t kAtomicWrite = 4096;

std::size_t bytes_in(const Descriptor& pipe) {
  int count = 0;
  ::ioctl(pipe.number(), FIONREAD, &count);
  return static_cast<std::size_t>(std::max(count, 0));
}

}  // namespace

std::string last_lines_of(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  std::size_t begin = text.size();
  for (int lines = 0; lines < kLastLines && begin != std::string_view::npos; ++lines)
    begin = begin == 0 ? std::string_view::npos : text.rfind('\n', begin - 1);
  return std::string(begin == std::string_view::npos ? text : text.substr(begin + 1));
}

struct OutputRelay::Stream {
  Source source;
  std::string partial;                   // of a line
  std::optional<std::size_t> remaining;  // bytes to read, once it is retired

  // Under the mutex:
  std::string last;  // what it wrote last, kMostBytes of it
  int requests = 0;  // calls of last_lines()
  int drained = 0;   // the requests before a read that found nothing
  bool retired = false;
  bool ended = false;  // nothing will come
};

OutputRelay::OutputRelay() {
  thread_ = quiet_thread([this] { run(); });
}

OutputRelay::~OutputRelay() {
  drop();
  retire_all();
  thread_.join();
}

OutputRelay::Id OutputRelay::add(Source source) {
  source.pipe.set_nonblocking();
  auto stream = std::make_shared<Stream>();
  stream->source = std::move(source);
  const std::lock_guard lock(mutex_);
  streams_.emplace(next_, std::move(stream));
  wake();
  return next_++;
}

std::string OutputRelay::last_lines(Id id) {
  std::unique_lock lock(mutex_);
  const auto found = streams_.find(id);
  if (found == streams_.end()) return {};
  const std::shared_ptr<Stream> stream = found->second;
  const int request = ++stream->requests;
  wake();
  changed_.wait_for(lock, std::chrono::seconds(1),
                    [&] { return stream->drained >= request || stream->ended; });
  return last_lines_of(stream->last);
}

void OutputRelay::retire(Id id) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(id);
  if (found != streams_.end()) found->second->retired = true;
  wake();
}

void OutputRelay::retire_all() {
  const std::lock_guard lock(mutex_);
  for (auto& [id, stream] : streams_) stream->retired = true;
  stop_ = true;
  wake();
}

void OutputRelay::finish(const Interrupt& interrupt, net::Time until) {
  retire_all();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return stopped_; })) {
    if (interrupt.urgent() || net::Clock::now() >= until) drop();
  }
}

void OutputRelay::drop() {
  aborted_ = true;
  abort_.set();
}

void OutputRelay::wake() const {
  wake_.set();
}

// -------------------------------------------------------------------------------------------------
// the thread

void OutputRelay::run() {
  while (true) {
    const auto streams = active();
    if (streams.empty()) {
      const std::lock_guard lock(mutex_);
      if (stop_ && streams_.empty()) {
        stopped_ = true;
        changed_.notify_all();
        return;
      }
    }
    std::vector<pollfd> events{{wake_.descriptor(), POLLIN, 0}};
    for (const auto& stream : streams) events.push_back({stream->source.pipe.number(), POLLIN, 0});
    // A retired stream has no event if it has no more output: it is read until it has ended.
    const bool has_retired = std::any_of(streams.begin(), streams.end(),
                                         [&](const auto& stream) { return is_retired(*stream); });
    net::poll_until(events, has_retired ? net::Clock::now() : net::Time::max());
    wake_.clear();
    for (const auto& stream : streams) read(*stream);
  }
}

std::vector<std::shared_ptr<OutputRelay::Stream>> OutputRelay::active() {
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_,
                [](const auto& entry) { return entry.second->retired && entry.second->ended; });
  std::vector<std::shared_ptr<Stream>> result;
  for (const auto& [id, stream] : streams_) {
    if (!stream->ended) result.push_back(stream);
  }
  return result;
}

bool OutputRelay::is_retired(const Stream& stream) {
  const std::lock_guard lock(mutex_);
  return stream.retired;
}

// Reads one piece, so that no stream waits long for the others.
void OutputRelay::read(Stream& stream) {
  std::unique_lock lock(mutex_);
  // As they are before the read: what is written after it may belong to a later request.
  const bool retired = stream.retired;
  const int requests = stream.requests;
  lock.unlock();
  // Not more than there is now: a process that left its group may write without pause.
  if (retired && !stream.remaining.has_value()) stream.remaining = bytes_in(stream.source.pipe);
  std::array<char, kMaxPiece> buffer;
  // A read of 0 bytes is an end, too.
  const std::size_t most = std::min(stream.remaining.value_or(kMaxPiece), buffer.size());
  const ssize_t count = ::read(stream.source.pipe.number(), buffer.data(), most);
  const bool nothing = count < 0 && errno == EAGAIN;
  if (count < 0 && errno == EINTR) return;
  if (count > 0) {
    if (stream.remaining.has_value()) *stream.remaining -= static_cast<std::size_t>(count);
    const std::string_view text(buffer.data(), static_cast<std::size_t>(count));
    if (stream.source.file.is_open() && !write_all(stream.source.file.number(), text)) {
      log()->warn("a log file of {} cannot be written any more: {}", stream.source.prefix,
                  reason_of(errno));
      stream.source.file.close();
    }
    stream.partial += text;
    relay(stream, false);
    lock.lock();
    stream.last += text;
    if (stream.last.size() > 2 * kMaxPiece) stream.last.erase(0, stream.last.size() - kMaxPiece);
    return;
  }
  const bool ended = !nothing || retired;
  if (ended) {
    relay(stream, true);
    stream.source.pipe.close();
  }
  lock.lock();
  stream.drained = requests;
  stream.ended = ended;
  changed_.notify_all();
}

// Writes whole lines, several at once if they fit into a piece.
void OutputRelay::relay(Stream& stream, bool all) {
  std::string pieces;
  std::size_t begin = 0;
  const auto take = [&](std::size_t end) {
    const std::size_t length = stream.source.prefix.size() + end - begin + 1;
    if (!pieces.empty() && pieces.size() + length > kAtomicWrite) {
      write_console(stream.source.console, pieces);
      pieces.clear();
    }
    pieces.append(stream.source.prefix).append(stream.partial, begin, end - begin) += '\n';
  };
  for (std::size_t end = 0; (end = stream.partial.find('\n', begin)) != std::string::npos;
       begin = end + 1)
    take(end);
  const bool cut = stream.partial.size() - begin >= kMaxPiece;
  if (begin < stream.partial.size() && (all || cut)) {
    take(stream.partial.size());
    begin = stream.partial.size();
  }
  stream.partial.erase(0, begin);
  write_console(stream.source.console, pieces);
}

void OutputRelay::write_console(int console, std::string_view text) {
  bool& gone = console_is_gone_[console];
  while (!text.empty() && !gone && !aborted_) {
    std::vector<pollfd> events{{console, POLLOUT, 0}, {abort_.descriptor(), POLLIN, 0}};
    net::poll_until(events, net::Time::max());
    if (aborted_) return;
    if (events[0].revents == 0) continue;
    const ssize_t count = ::write(console, text.data(), std::min(text.size(), kAtomicWrite));
    const int error = errno;
    if (count > 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (error == EPIPE) {
      gone = true;  // it has no reader any more; the files continue
    } else if (error != EINTR && error != EAGAIN) {
      // A full disk may have room for what follows.
      if (!std::exchange(console_has_failed_[console], true))
        log()->warn("output of the processes is lost, since standard {} cannot be written: {}",
                    console == STDERR_FILENO ? "error" : "output", reason_of(error));
      return;
    }
  }
}

}  // namespace semitone::launch

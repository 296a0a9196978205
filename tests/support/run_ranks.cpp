#include "tests/support/run_ranks.h"

#include "src/core/descriptor.h"
#include "src/launch/child.h"
#include "src/net/address.h"
#include "src/net/clock.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace semitone::test {
namespace {

constexpr auto kReport = "@@ ";
constexpr auto kThreads = "OMP_NUM_THREADS";
constexpr std::chrono::milliseconds kForever(-1);  // poll() waits without a limit

using net::Clock;

// Sent to the starter: start the ranks of a test.
struct Request {
  int count = 0;
  int port = 0;
  std::array<char, 256> folder{};
  std::array<char, 256> test{};  // as --gtest_filter has it
};

// Received from it: a rank has started, or has ended.
struct Event {
  int rank = 0;
  pid_t id = 0;
  bool ended = false;
  int status = 0;  // as waitpid() returns it
};

template <typename T>
bool send_all(const Descriptor& socket, const T& value) {
  return ::send(socket.number(), &value, sizeof(value), MSG_NOSIGNAL) == sizeof(value);
}

template <typename T>
std::optional<T> receive(const Descriptor& socket) {
  T value;
  if (::recv(socket.number(), &value, sizeof(value), 0) != sizeof(value)) return std::nullopt;
  return value;
}

template <std::size_t size>
void copy(std::string_view text, std::array<char, size>& to) {
  if (text.size() >= size) throw std::length_error(std::string(text));
  *std::copy(text.begin(), text.end(), to.begin()) = '\0';
}

// Of this process, if it is a rank.
struct Role {
  int rank = 0;
  Request request;
};

// The socket to the starter, in the original process.
Descriptor& starter() {
  static Descriptor socket;
  return socket;
}

std::optional<Role>& role() {
  static std::optional<Role> value;
  return value;
}

std::filesystem::path output_of(const std::filesystem::path& folder, int rank, const char* stream) {
  return folder / ("rank" + std::to_string(rank) + "." + stream);
}

void end_with_the_parent(pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
}

void redirect(int stream, const std::filesystem::path& file) {
  const Descriptor opened(::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600));
  if (::dup2(opened.number(), stream) != stream) ::_exit(1);
}

// In a new process: sets what torchrun sets, and writes to files beside the folder that ranks share.
void become_rank(int rank, const Request& request) {
  const std::filesystem::path folder = request.folder.data();
  redirect(STDOUT_FILENO, output_of(folder, rank, "out"));
  redirect(STDERR_FILENO, output_of(folder, rank, "err"));
  const std::string count = std::to_string(request.count);
  const std::string number = std::to_string(rank);
  ::setenv("RANK", number.c_str(), 1);
  ::setenv("WORLD_SIZE", count.c_str(), 1);
  ::setenv("LOCAL_RANK", number.c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", count.c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(request.port).c_str(), 1);
  role() = Role{rank, request};
}

// In the starter: true in a process that is a rank now, false if the ranks have ended.
bool start_ranks(const Descriptor& socket, const Request& request) {
  const pid_t self = ::getpid();
  std::vector<pid_t> ids;
  for (int rank = 0; rank < request.count; ++rank) {
    const pid_t id = ::fork();
    if (id == 0) {
      end_with_the_parent(self);
      become_rank(rank, request);
      return true;
    }
    if (id < 0) ::_exit(1);  // which ends those that have started, and the test
    ids.push_back(id);
    send_all(socket, Event{rank, id, false, 0});
  }
  for (int left = request.count; left > 0; --left) {
    int status = 0;
    const pid_t id = ::waitpid(-1, &status, 0);
    const auto rank = std::find(ids.begin(), ids.end(), id) - ids.begin();
    send_all(socket, Event{static_cast<int>(rank), id, true, status});
  }
  return false;
}

// Returns in the original process, and in each rank. In between is the starter: a copy of this
// process from before it did anything.
void start_the_starter() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) std::abort();
  Descriptor ours(ends[0]);
  const Descriptor its(ends[1]);
  const pid_t self = ::getpid();
  if (::fork() != 0) {
    starter() = std::move(ours);
    return;
  }
  ours.close();
  end_with_the_parent(self);
  while (const auto request = receive<Request>(its)) {
    if (start_ranks(its, *request)) return;
  }
  ::_exit(0);
}

[[noreturn]] void be_a_rank(const Role& role, const std::function<void(Rank&)>& body) {
  Rank rank(role.rank, role.request.count,
            std::filesystem::path(role.request.folder.data()) / "shared");
  try {
    body(rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank.number() << " threw: " << error.what();
  }
  std::cout.flush();
  std::fflush(nullptr);
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

// A TCP port of 127.0.0.1 that no other process gets while this lives. A rank can listen at it:
// sockets with SO_REUSEADDR share a port as long as only one of them listens.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::setsockopt(socket_.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        ::bind(socket_.number(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) != 0) {
      throw std::runtime_error("no free port: " + reason_of(errno));
    }
  }

  int number() const { return net::address_of(socket_).port; }

 private:
  Descriptor socket_;
};

std::vector<std::string> reports_in(const std::string& output) {
  std::vector<std::string> reports;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(kReport, 0) == 0) reports.push_back(line.substr(std::string(kReport).size()));
  }
  return reports;
}

// The ranks of one call of run_ranks, which the starter has been asked to start.
class Ranks {
 public:
  Ranks(int count, const std::vector<int>& casualties)
      : ids_(static_cast<std::size_t>(count)),
        statuses_(static_cast<std::size_t>(count)),
        casualties_(casualties.begin(), casualties.end()) {
    for (int rank = 0; rank < count; ++rank) running_.insert(rank);
    for (int rank = 0; rank < count; ++rank) take_event(kForever);  // it has started
  }

  // Whether all have ended that were to end.
  bool wait(std::chrono::seconds timeout) {
    const auto deadline = Clock::now() + timeout;
    while (
        !std::includes(casualties_.begin(), casualties_.end(), running_.begin(), running_.end())) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      if (!take_event(std::max(left, std::chrono::milliseconds(0)))) return false;
    }
    return true;
  }

  // Ends those that are left.
  void kill() {
    for (const int rank : running_) ::kill(ids_.at(static_cast<std::size_t>(rank)), SIGKILL);
    while (!running_.empty()) take_event(kForever);
  }

  bool is_casualty(int rank) const { return casualties_.count(rank) > 0; }
  const std::set<int>& running() const { return running_; }
  launch::ExitStatus status_of(int rank) const {
    return launch::exit_status(statuses_.at(static_cast<std::size_t>(rank)));
  }

 private:
  // False if none came before the time was up.
  bool take_event(std::chrono::milliseconds timeout) {
    pollfd socket{starter().number(), POLLIN, 0};
    if (::poll(&socket, 1, static_cast<int>(timeout.count())) == 0) return false;
    const auto event = receive<Event>(starter());
    if (!event) throw std::runtime_error("the process that starts ranks has ended");
    const auto index = static_cast<std::size_t>(event->rank);
    ids_.at(index) = event->id;
    if (event->ended) {
      statuses_.at(index) = event->status;
      running_.erase(event->rank);
    }
    return true;
  }

  std::vector<pid_t> ids_;
  std::vector<int> statuses_;
  std::set<int> casualties_;
  std::set<int> running_;
};

std::string name_of_this_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->test_suite_name()) + "." + test->name();
}

}  // namespace

void Rank::report(const std::string& text) const {
  std::cout << kReport + text + "\n" << std::flush;
}

void Rank::meet() {
  const std::string name = "meeting" + std::to_string(++meetings_) + "-";
  const auto file = [&](int rank) { return folder_ / (name + std::to_string(rank)); };
  std::ofstream(file(number_)) << "here";
  for (int other = 0; other < count_; ++other)
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file(other)); }));
}

std::vector<RankResult> run_ranks(int count, const std::function<void(Rank&)>& body,
                                  const RankOptions& options) {
  if (role()) be_a_rank(*role(), body);
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "shared");
  const ReservedPort port;
  Request request;
  request.count = count;
  request.port = port.number();
  copy(folder.path().string(), request.folder);
  copy(name_of_this_test(), request.test);
  if (!send_all(starter(), request)) throw std::runtime_error("ranks cannot be started");

  Ranks ranks(count, options.casualties);
  const bool in_time = ranks.wait(options.timeout);
  for (const int rank : ranks.running()) {
    if (!ranks.is_casualty(rank)) ADD_FAILURE() << "rank " << rank << " did not end in time";
  }
  ranks.kill();
  std::vector<RankResult> results;
  for (int rank = 0; rank < count; ++rank) {
    const std::string out = read_text(output_of(folder.path(), rank, "out"));
    results.push_back({ranks.status_of(rank), reports_in(out),
                       out + read_text(output_of(folder.path(), rank, "err"))});
    const RankResult& result = results.back();
    if ((result.status.success() || ranks.is_casualty(rank)) && in_time) continue;
    ADD_FAILURE() << "rank " << rank << ": " << result.status.to_string() << "\n" << result.output;
  }
  return results;
}

}  // namespace semitone::test

int main(int argc, char** argv) {
  using namespace semitone::test;
  // As torchrun does: threads of several processes that compete for cores slow all of them down. On
  // the CPU, and so over Gloo, wherever the tests run.
  ::setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
  if (const char* const threads = std::getenv(kThreads);
      threads == nullptr || std::string_view(threads) != "1") {
    ::setenv(kThreads, "1", 1);  // read when a program is loaded
    ::execv("/proc/self/exe", argv);
    return 1;
  }
  start_the_starter();
  testing::InitGoogleMock(&argc, argv);
  if (role()) {
    GTEST_FLAG_SET(filter, role()->request.test.data());
    GTEST_FLAG_SET(brief, true);
  }
  return RUN_ALL_TESTS();
}

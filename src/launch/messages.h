#pragma once

#include "semitone/launch/launch_result.h"

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

// The messages between launchers: one line of JSON each. An Outcome is sent as "verdict", a
// Heartbeat as "beat".
namespace semitone::launch {

// Two launchers work together if their versions are equal. Of a message of another version,
// "protocol" in a join and a refusing outcome can be read.
constexpr int kProtocol = 4;

// A node's launcher asks to take part in the next attempt.
struct Join {
  int protocol = kProtocol;
  std::string token;   // empty: not set
  std::string run_id;  // empty: not set
  int min_nodes = 1;
  int max_nodes = 1;
  int node_rank = -1;  // -1: in order of arrival
  int processes = 1;
  std::string program;  // the name of its file, for messages: other bytes than UTF-8 are replaced
  std::string command;  // digest of that name and the arguments: digest_of()
  std::string host;
};

// The job has no room for a node: it waits until another node is lost.
struct StandBy {
  std::string reason;
};

// An attempt begins, with everything that a node needs for it.
struct Assignment {
  std::string run_id;
  int attempt = 0;  // counts every start, restarts only those after a failure
  int restarts = 0;
  int max_restarts = 0;
  int node = 0;
  int nodes = 1;
  int first_rank = 0;
  int world_size = 1;
  std::string master_addr;
  int master_port = 0;
};

// All of a node's processes returned 0.
struct Succeeded {};

// A node's launcher stops its processes and leaves.
struct Leave {
  std::string reason;
};

// How an attempt ended.
struct Outcome {
  enum class Kind { succeeded, failed, lost, restart, refused };

  Kind kind = Kind::succeeded;
  std::optional<WorkerFailure> failure;
  std::string reason;
};

// A heartbeat, so that silence is meaningful.
struct Heartbeat {};

using Message =
    std::variant<Join, StandBy, Assignment, WorkerFailure, Succeeded, Leave, Outcome, Heartbeat>;

// The message as a line, without its end.
std::string encode(const Message& message);

// Nothing if the line is not a message. A join of another version has its protocol and nothing
// else.
std::optional<Message> decode(std::string_view line);

// The same for equal lists and different for others, so that the arguments of a program need not be
// sent over the network for comparison.
std::string digest_of(const std::vector<std::string>& words);

}  // namespace semitone::launch

#pragma once

#include "semitone/launch/launcher.h"

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

// What launchers say to each other: one line of JSON each.
namespace semitone::launch {

// Two launchers work together if theirs are equal. Of every other version, what a join has under
// "protocol" and a verdict that refuses can be read.
constexpr int kProtocol = 2;

// A node's launcher wants to take part in the next attempt.
struct Join {
  int protocol = kProtocol;
  std::string run_id;  // empty: none was given
  int min_nodes = 1;
  int max_nodes = 1;
  int node_rank = -1;  // -1: as it comes
  int processes = 1;
  std::string program;    // the name of its file
  std::string arguments;  // what tells two lists apart: digest_of()
  std::string host;
};

// There is no room for a node in the job: it waits until another one is gone.
struct StandBy {
  std::string reason;
};

// An attempt begins; what a node has to know for it.
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

// A node's launcher stops its processes and goes.
struct Leave {
  std::string reason;
};

// How an attempt ended.
struct Verdict {
  enum class Kind { succeeded, failed, lost, restart, refused };

  Kind kind = Kind::succeeded;
  std::optional<WorkerFailure> failure;
  std::string reason;
};

// Said now and then, so that silence means something.
struct Beat {};

using Message =
    std::variant<Join, StandBy, Assignment, WorkerFailure, Succeeded, Leave, Verdict, Beat>;

// With a newline at its end.
std::string encode(const Message& message);

// Nothing if it is not one of ours. A join of another version has its protocol and nothing else.
std::optional<Message> decode(std::string_view line);

// Of equal lists the same, of others another: what a program is told need not go over the network
// to be compared.
std::string digest_of(const std::vector<std::string>& words);

}  // namespace semitone::launch

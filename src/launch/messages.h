#pragma once

#include "semitone/launch/launcher.h"

#include <optional>
#include <string>
#include <string_view>
#include <variant>

// What launchers say to each other: one line of JSON each.
namespace semitone::launch {

constexpr int kProtocol = 1;

// A node's launcher wants to take part in the next attempt.
struct Join {
  int protocol = kProtocol;
  std::string run_id;  // empty: whatever the job is called
  int min_nodes = 1;
  int max_nodes = 1;
  int node_rank = -1;  // -1: as it comes
  int processes = 1;
  std::string host;
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

using Message = std::variant<Join, Assignment, WorkerFailure, Succeeded, Leave, Verdict, Beat>;

// With a newline at its end.
std::string encode(const Message& message);

// Nothing if it is not one of ours.
std::optional<Message> decode(std::string_view line);

}  // namespace semitone::launch

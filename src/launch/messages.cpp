#include "src/launch/messages.h"

#include <nlohmann/json.hpp>

namespace semitone::launch {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExitStatus, code, signal)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerFailure, rank, local_rank, node, host, pid, status, log,
                                   last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Join, protocol, run_id, min_nodes, max_nodes, node_rank,
                                   processes, host)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, run_id, attempt, restarts, max_restarts, node, nodes,
                                   first_rank, world_size, master_addr, master_port)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Leave, reason)
NLOHMANN_JSON_SERIALIZE_ENUM(Verdict::Kind, {{Verdict::Kind::succeeded, "succeeded"},
                                             {Verdict::Kind::failed, "failed"},
                                             {Verdict::Kind::lost, "lost"},
                                             {Verdict::Kind::restart, "restart"},
                                             {Verdict::Kind::refused, "refused"}})

namespace {

json body_of(const Verdict& verdict) {
  json body{{"kind", verdict.kind}, {"reason", verdict.reason}};
  if (verdict.failure.has_value()) body["failure"] = *verdict.failure;
  return body;
}

Verdict verdict_of(const json& body) {
  Verdict verdict{body.at("kind"), std::nullopt, body.at("reason")};
  if (body.contains("failure")) verdict.failure = body.at("failure").get<WorkerFailure>();
  return verdict;
}

struct Encode {
  json operator()(const Join& message) const { return {{"join", message}}; }
  json operator()(const Assignment& message) const { return {{"assignment", message}}; }
  json operator()(const WorkerFailure& message) const { return {{"failure", message}}; }
  json operator()(const Succeeded&) const { return {{"succeeded", true}}; }
  json operator()(const Leave& message) const { return {{"leave", message}}; }
  json operator()(const Verdict& message) const { return {{"verdict", body_of(message)}}; }
  json operator()(const Beat&) const { return {{"beat", true}}; }
};

}  // namespace

std::string encode(const Message& message) {
  // What processes print need not be UTF-8.
  return std::visit(Encode(), message).dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::optional<Message> decode(std::string_view line) {
  try {
    const json message = json::parse(line);
    if (!message.is_object() || message.size() != 1) return std::nullopt;
    const std::string& name = message.begin().key();
    const json& body = message.begin().value();
    if (name == "beat") return Beat();
    if (name == "join") return body.get<Join>();
    if (name == "assignment") return body.get<Assignment>();
    if (name == "failure") return body.get<WorkerFailure>();
    if (name == "succeeded") return Succeeded();
    if (name == "leave") return body.get<Leave>();
    if (name == "verdict") return verdict_of(body);
  } catch (const json::exception&) {
    // Said below.
  }
  return std::nullopt;
}

}  // namespace semitone::launch

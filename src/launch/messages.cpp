#include "src/launch/messages.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <limits>
#include <utility>

namespace semitone::launch {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExitStatus, code, signal)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerFailure, rank, local_rank, node, host, pid, status, log,
                                   last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Join, protocol, token, run_id, min_nodes, max_nodes, node_rank,
                                   processes, program, command, host)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StandBy, reason)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, run_id, attempt, restarts, max_restarts, node, nodes,
                                   first_rank, world_size, master_addr, master_port)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Leave, reason)

namespace {

// Not NLOHMANN_JSON_SERIALIZE_ENUM, which converts an unknown word to the first of its list.
constexpr std::array kOutcomes{
    std::pair("succeeded", Outcome::Kind::succeeded), std::pair("failed", Outcome::Kind::failed),
    std::pair("lost", Outcome::Kind::lost), std::pair("restart", Outcome::Kind::restart),
    std::pair("refused", Outcome::Kind::refused)};

const char* to_string(Outcome::Kind kind) {
  const auto* const found = std::find_if(kOutcomes.begin(), kOutcomes.end(),
                                         [&](const auto& entry) { return entry.second == kind; });
  return found->first;
}

std::optional<Outcome::Kind> parse_kind(const std::string& name) {
  const auto* const found = std::find_if(kOutcomes.begin(), kOutcomes.end(),
                                         [&](const auto& entry) { return entry.first == name; });
  if (found == kOutcomes.end()) return std::nullopt;
  return found->second;
}

json to_json_body(const Outcome& outcome) {
  json body{{"kind", to_string(outcome.kind)}, {"reason", outcome.reason}};
  if (outcome.failure.has_value()) body["failure"] = *outcome.failure;
  return body;
}

// Launchers return the status as their own exit code.
std::optional<WorkerFailure> parse_failure(const json& body) {
  auto failure = body.get<WorkerFailure>();
  const auto [code, signal] = failure.status;
  const bool is_failure =
      code >= 0 && code <= 255 && signal >= 0 && signal < NSIG && !failure.status.success();
  return is_failure ? std::optional(std::move(failure)) : std::nullopt;
}

std::optional<Message> parse_outcome(const json& body) {
  const auto kind = parse_kind(body.at("kind").get<std::string>());
  if (!kind.has_value()) return std::nullopt;
  Outcome outcome{*kind, std::nullopt, body.at("reason")};
  const bool has_failure = body.contains("failure");
  if (has_failure) outcome.failure = parse_failure(body.at("failure"));
  // Who receives `failed` shows the failure.
  const bool is_whole = has_failure ? outcome.failure.has_value() : *kind != Outcome::Kind::failed;
  return is_whole ? std::optional<Message>(std::move(outcome)) : std::nullopt;
}

Join parse_join(const json& body) {
  Join join;
  join.protocol = body.at("protocol").get<int>();
  return join.protocol == kProtocol ? body.get<Join>() : join;
}

// The line as JSON, or nothing if it is none. Every number must be an int: json converts others to
// any int. Messages are three deep.
std::optional<json> parse_line(std::string_view line) {
  constexpr int kMaxNesting = 10;
  bool is_good = true;
  const auto check = [&](int depth, json::parse_event_t event, const json& value) {
    if (depth > kMaxNesting) is_good = false;
    if (event == json::parse_event_t::value && value.is_number()) {
      const bool is_int = value.is_number_integer() && value >= std::numeric_limits<int>::min() &&
                          value <= std::numeric_limits<int>::max();
      if (!is_int) is_good = false;
    }
    return is_good;
  };
  json message = json::parse(line, check);
  return is_good ? std::optional(std::move(message)) : std::nullopt;
}

struct Encode {
  json operator()(const Join& message) const { return {{"join", message}}; }
  json operator()(const StandBy& message) const { return {{"stand_by", message}}; }
  json operator()(const Assignment& message) const { return {{"assignment", message}}; }
  json operator()(const WorkerFailure& message) const { return {{"failure", message}}; }
  json operator()(const Succeeded&) const { return {{"succeeded", true}}; }
  json operator()(const Leave& message) const { return {{"leave", message}}; }
  json operator()(const Outcome& message) const { return {{"verdict", to_json_body(message)}}; }
  json operator()(const Heartbeat&) const { return {{"beat", true}}; }
};

}  // namespace

std::string encode(const Message& message) {
  // What processes print need not be UTF-8.
  return std::visit(Encode(), message).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<Message> decode(std::string_view line) {
  try {
    const auto message = parse_line(line);
    if (!message.has_value() || !message->is_object() || message->size() != 1) return std::nullopt;
    const std::string& name = message->begin().key();
    const json& body = message->begin().value();
    if (name == "beat") return Heartbeat();
    if (name == "join") return parse_join(body);
    if (name == "stand_by") return body.get<StandBy>();
    if (name == "assignment") return body.get<Assignment>();
    if (name == "failure") return parse_failure(body);
    if (name == "succeeded") return Succeeded();
    if (name == "leave") return body.get<Leave>();
    if (name == "verdict") return parse_outcome(body);
  } catch (const json::exception&) {
    // Reported below.
  }
  return std::nullopt;
}

// FNV-1a, with a zero after each word. It detects mistakes, not attacks.
std::string digest_of(const std::vector<std::string>& words) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&hash](char letter) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  };
  for (const std::string& word : words) {
    for (const char letter : word) add(letter);
    add('\0');
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace semitone::launch

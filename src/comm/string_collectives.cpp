#include "semitone/comm/group.h"
#include "src/comm/checks.h"
#include "src/comm/process_group.h"
#include "src/comm/strings.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Collectives and messages that carry strings.
namespace semitone::comm {
namespace {

// Strings are sent in parts: they may be as large as a checkpoint, and pass through the device's
// memory.
constexpr std::size_t kStringChunkBytes = 32 * 1024 * 1024;

at::Tensor length_of(std::string_view text, c10::Device device) {
  return at::full({1}, static_cast<std::int64_t>(text.size()),
                  at::TensorOptions(at::kLong).device(device));
}

// Replaces each part of a string by the bytes that `transfer` returns for it.
template <typename Transfer>
void for_each_part(std::string& text, const Transfer& transfer) {
  for (std::size_t start = 0; start < text.size(); start += kStringChunkBytes) {
    const auto part = std::string_view(text).substr(start, kStringChunkBytes);
    copy_bytes(transfer(part), text.data() + start, part.size());
  }
}

}  // namespace

std::string Group::broadcast(std::string text, int root) const {
  check_root(root, size(), "broadcast");
  if (impl_->process_group == nullptr) return text;
  at::Tensor length = length_of(text, device());
  broadcast(length, root);
  text.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
  for_each_part(text, [&](std::string_view part) {
    at::Tensor bytes = to_bytes(part, device());
    broadcast(bytes, root);
    return bytes;
  });
  return text;
}

std::vector<std::string> Group::all_gather(const std::string& text) const {
  if (impl_->process_group == nullptr) return {text};
  return gather_strings(text, device(),
                        [this](const at::Tensor& tensor) { return all_gather(tensor); });
}

void send_string(const Group& group, const std::string& text, int to) {
  const auto send = [&](const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor};
    process_group(group)->send(tensors, to, /*tag=*/0)->wait();
  };
  send(length_of(text, group.device()));
  std::string_view rest = text;
  while (!rest.empty()) {
    send(to_bytes(rest.substr(0, kStringChunkBytes), group.device()));
    rest.remove_prefix(std::min(kStringChunkBytes, rest.size()));
  }
}

std::string receive_string(const Group& group, int from) {
  const auto receive = [&](const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor};
    process_group(group)->recv(tensors, from, /*tag=*/0)->wait();
    return tensor;
  };
  const at::Tensor length = receive(length_of("", group.device()));
  std::string text(static_cast<std::size_t>(length.item<std::int64_t>()), '\0');
  for_each_part(text,
                [&](std::string_view part) { return receive(to_bytes(part, group.device())); });
  return text;
}

}  // namespace semitone::comm

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

// LibTorch's transports, one file each; no_nccl.cpp stands in where the build lacks NCCL.
namespace semitone::comm {

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string address;  // local IP address to listen on
  c10::Device device = c10::kCPU;
};

struct Transport {
  c10::intrusive_ptr<c10d::Backend> backend;
  bool is_queued = false;  // see queued_transport.h
  // What a thread that asks its works needs, if anything.
  std::function<std::shared_ptr<void>()> enter_thread;
};

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request);

bool has_nccl();
Transport make_nccl(const BackendRequest& request);
// What tells a GPU from every other one, on this machine and others.
std::string gpu_identity(c10::Device device);

}  // namespace semitone::comm

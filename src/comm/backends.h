#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
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

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request);

bool has_nccl();
c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendRequest& request);

}  // namespace semitone::comm

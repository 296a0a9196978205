#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

// LibTorch's transports, one file each; no_nccl.cpp and no_mpi.cpp stand in where the build lacks
// one.
namespace semitone::comm {

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string address;  // local IP address to listen on
  int local_rank = 0;
};

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request);

bool has_nccl();
c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendRequest& request);

bool has_mpi();
c10::intrusive_ptr<c10d::Backend> make_mpi(const BackendRequest& request);

}  // namespace semitone::comm

#pragma once

// Internal interface: other rooms include this header.

#include "src/comm/watch.h"

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// LibTorch's transports, one file each; no_nccl.cpp stands in where the build lacks NCCL. To add one,
// write a function that returns its Backend, and list it in backends().
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
  // Called by a thread before it polls the backend's works; the result lives as long as the thread.
  // Null if such a thread needs no preparation.
  std::function<std::shared_ptr<void>()> enter_thread;
};

struct Backend {
  std::string_view name;                          // for InitOptions::backend
  bool available = false;                         // in this build
  c10::DeviceType device = c10::DeviceType::CPU;  // of the tensors that it takes
  c10d::ProcessGroup::BackendType type = c10d::ProcessGroup::BackendType::CUSTOM;
  // Whether it implements reduce_scatter. Otherwise all_reduce replaces it.
  bool has_reduce_scatter = false;
  // Connects the ranks. CommError if the watch reports a loss meanwhile. Null if not available.
  Transport (*make)(const BackendRequest& request, Watch& watch) = nullptr;
  // Distinguishes a GPU from all others, on this machine and others. Null for the CPU.
  std::string (*device_identity)(c10::Device device) = nullptr;
  std::string_view remedy;   // how to build with it
  std::string_view warning;  // that backend "auto" logs before it uses gloo instead
};

Backend gloo_backend();
Backend nccl_backend();

inline const std::vector<Backend>& backends() {
  static const std::vector<Backend> all{gloo_backend(), nccl_backend()};
  return all;
}

// Null for an unknown name.
const Backend* find_backend(std::string_view name);

// A backend for tensors on any other type of device than this one, which errors suggest.
const Backend& backend_for_other_device(c10::DeviceType device);

// "gloo, nccl"
std::string backend_names();

}  // namespace semitone::comm

#pragma once

#include "semitone/comm/init_options.h"
#include "src/comm/rendezvous.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

// The key-value store for the rendezvous: c10d's, with strings as values and Semitone's errors.
namespace semitone::comm {

// Connects to the store of a rendezvous within the options' timeout; rank 0 hosts it unless a
// launcher does.
c10::intrusive_ptr<c10d::Store> open_store(const Rendezvous& rendezvous,
                                           const InitOptions& options);

void put(c10d::Store& store, const std::string& key, std::string_view value);
std::string get(c10d::Store& store, const std::string& key);  // waits for the key

// Returns the values at prefix + rank for all ranks.
std::vector<std::string> get_of_ranks(c10d::Store& store, const std::string& prefix, int size);

// The ranks without a value at prefix + rank.
std::vector<int> ranks_without_value(c10d::Store& store, const std::string& prefix, int size);

// Waits for prefix + rank of every rank, and returns the ranks that did not come in time.
std::vector<int> wait_for_ranks(c10d::Store& store, const std::string& prefix, int size,
                                std::chrono::milliseconds timeout);

}  // namespace semitone::comm

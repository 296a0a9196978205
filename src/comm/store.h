#pragma once

#include "semitone/comm/init.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The key-value store through which processes meet: c10d's, with texts for values and errors of
// ours.
namespace semitone::comm {

// Connects to the store of a rendezvous; rank 0 hosts it unless a launcher does. The listening
// socket is bound to `address` alone.
c10::intrusive_ptr<c10d::Store> open_store(const Rendezvous& rendezvous,
                                           std::chrono::milliseconds timeout);

// The local IP address that connections to a host leave from: that of the interface which leads
// there.
std::string address_towards(const std::string& host, int port);

// The IP address of an interface. Error if there is none of that name, with the names there are.
std::string address_of_interface(const std::string& name);

void put(c10d::Store& store, const std::string& key, std::string_view value);
std::string get(c10d::Store& store, const std::string& key);                  // waits for the key
std::optional<std::string> peek(c10d::Store& store, const std::string& key);  // does not wait

}  // namespace semitone::comm

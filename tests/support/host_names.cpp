#include "tests/support/host_names.h"

#include <dlfcn.h>
#include <netdb.h>

#include <map>
#include <mutex>
#include <utility>

namespace semitone::test {
namespace {

// Launchers in several threads look names up.
struct Table {
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> addresses_of;
};

Table& table() {
  static Table names;
  return names;
}

std::vector<std::string> addresses_of(const char* host) {
  if (host == nullptr) return {};
  const std::lock_guard lock(table().mutex);
  const auto found = table().addresses_of.find(host);
  return found == table().addresses_of.end() ? std::vector<std::string>() : found->second;
}

}  // namespace

HostName::HostName(std::string name, std::vector<std::string> addresses) : name_(std::move(name)) {
  const std::lock_guard lock(table().mutex);
  table().addresses_of.emplace(name_, std::move(addresses));
}

HostName::~HostName() {
  const std::lock_guard lock(table().mutex);
  table().addresses_of.erase(name_);
}

}  // namespace semitone::test

// Links the results of the C library's function for each address. Its freeaddrinfo frees the
// entries of a list one by one.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto of_libc = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool is_numerical = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  const auto addresses = semitone::test::addresses_of(host);
  if (is_numerical || addresses.empty()) return of_libc(host, service, hints, found);
  addrinfo* first = nullptr;
  addrinfo** next = &first;
  for (const std::string& address : addresses) {
    if (const int error = of_libc(address.c_str(), service, hints, next); error != 0) {
      *next = nullptr;
      if (first != nullptr) ::freeaddrinfo(first);
      return error;
    }
    while (*next != nullptr) next = &(*next)->ai_next;
  }
  *found = first;
  return 0;
}

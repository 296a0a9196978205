#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

namespace semitone::test {

// Root may write anywhere, so it becomes another user meanwhile.
class AnotherUser {
 public:
  AnotherUser() : was_root_(::geteuid() == 0) { EXPECT_TRUE(!was_root_ || ::seteuid(65534) == 0); }
  ~AnotherUser() { EXPECT_TRUE(!was_root_ || ::seteuid(0) == 0); }
  AnotherUser(const AnotherUser&) = delete;
  AnotherUser& operator=(const AnotherUser&) = delete;

 private:
  bool was_root_;
};

}  // namespace semitone::test

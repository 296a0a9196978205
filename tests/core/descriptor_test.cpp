#include "src/core/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace semitone {
namespace {

Descriptor open_null() {
  return Descriptor(::open("/dev/null", O_RDWR | O_CLOEXEC));
}

bool is_known(int number) {
  return ::fcntl(number, F_GETFD) != -1;
}

TEST(Descriptor, IsClosedAtTheEndOfItsScope) {
  int number = -1;
  {
    const Descriptor descriptor = open_null();
    ASSERT_TRUE(descriptor.is_open());
    number = descriptor.number();
    EXPECT_TRUE(is_known(number));
  }
  EXPECT_FALSE(is_known(number));
}

TEST(Descriptor, HasOneOwner) {
  Descriptor first = open_null();
  const int number = first.number();
  {
    Descriptor second = std::move(first);
    EXPECT_EQ(second.number(), number);
    first = std::move(second);
  }
  EXPECT_TRUE(is_known(number));
  EXPECT_EQ(first.release(), number);
  EXPECT_FALSE(first.is_open());
  EXPECT_EQ(::close(number), 0);
}

TEST(Descriptor, TellsWhetherItCouldBeClosed) {
  Descriptor descriptor = open_null();
  EXPECT_TRUE(descriptor.close());
  EXPECT_FALSE(descriptor.is_open());
  EXPECT_TRUE(descriptor.close());
  // Larger than any that a process may have.
  Descriptor unknown(1 << 30);
  EXPECT_FALSE(unknown.close());
  EXPECT_EQ(errno, EBADF);
}

TEST(Descriptor, CanBeMadeNotToWait) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor read(ends[0]);
  const Descriptor write(ends[1]);
  read.set_nonblocking();
  char byte = 0;
  EXPECT_EQ(::read(read.number(), &byte, 1), -1);
  EXPECT_EQ(errno, EAGAIN);
}

}  // namespace
}  // namespace semitone

#pragma once

namespace semitone::report {

// As long as an object exists, the operators that this thread calls are shown to the CheckState in
// force. End it on the same thread; elsewhere it stays, without effect once the state looks no more.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Leaves this thread's records as they are, when it is not the one that began the watch.
  void abandon() { abandoned_ = true; }

 private:
  bool abandoned_ = false;
};

}  // namespace semitone::report

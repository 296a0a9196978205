#pragma once

namespace semitone {

// While an object of this class exists, its thread runs a step that is captured in a graph of a
// device, or will be. A replay repeats the device's work only. Code that also has to work on the
// host each time, such as communication between ranks, must refuse to run.
class CaptureScope {
 public:
  CaptureScope();
  ~CaptureScope();
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;

  // Whether there is one on this thread.
  static bool is_active();
};

}  // namespace semitone

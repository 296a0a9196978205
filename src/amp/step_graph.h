#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace semitone::amp {

// Work on a device that is recorded once and replayed: a CUDA graph.
class StepGraph {
 public:
  virtual ~StepGraph() = default;

  // Calls work() on the stream on which capture() will run, so that autograd and the libraries
  // create their state for this stream before a capture.
  virtual void warm_up(const std::function<void()>& work) = 0;

  // Records the device's work in work() without running it. Memory that work() allocates on the
  // device lives as long as the graph. If work() throws, or cannot be recorded, an exception
  // propagates and nothing is recorded.
  virtual void capture(const std::function<void()>& work) = 0;

  // Runs the recorded work on the device's current stream.
  virtual void replay() = 0;

  // Drops the recorded work.
  virtual void reset() = 0;
};

// Null for a device without graphs.
std::unique_ptr<StepGraph> make_step_graph(c10::Device device);

}  // namespace semitone::amp

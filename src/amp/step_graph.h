#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace semitone::amp {

// Work on a device that is recorded once and replayed: a CUDA graph.
class StepGraph {
 public:
  virtual ~StepGraph() = default;

  // Calls work() where the same work can be captured later.
  virtual void warm_up(const std::function<void()>& work) = 0;

  // Records what work() asks the device to do, which does not happen now. Memory that work()
  // allocates on the device lives as long as the graph. If work() throws, or does what cannot be
  // recorded, an exception comes out and nothing is recorded.
  virtual void capture(const std::function<void()>& work) = 0;

  // Has the device do it, on its current stream.
  virtual void replay() = 0;

  // Forgets it.
  virtual void reset() = 0;
};

// Null where a device has no graphs.
std::unique_ptr<StepGraph> make_step_graph(c10::Device device);

}  // namespace semitone::amp

#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/comm_hook.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

// What compressing hooks with error feedback have in common.
//
// A bucket needs two messages, and the second one depends on the result of the first. If it were
// sent from the callback of the first, the order of messages would depend on timing, and ranks
// would match messages wrongly. So reduce() sends it, on the thread of the backward pass: that of
// bucket k after the first message of bucket k + 1, and that of the last bucket at its own end.
//
// A step may be skipped because of a bucket that comes late in its backward pass. Therefore nothing
// of a pass becomes the hook's state before all of its buckets have arrived, and are finite. All
// ranks decide this from the same received values. The decision is made before the next pass.
namespace semitone::parallel::detail {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// A bucket of a pass.
struct CompressedBucket {
  std::size_t index = 0;
  std::vector<std::size_t> parameters;  // by their places in the hook's list
  std::vector<at::Tensor> shapes;       // these parameters
  at::Tensor input;                     // this rank's gradients and errors, flat
  int ranks = 1;
};

// The reduction of one bucket.
class Exchange {
 public:
  Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  virtual ~Exchange() = default;

  // Starts the first message.
  virtual FuturePtr start(const comm::Group& group) = 0;
  // The first message has arrived: starts the second one.
  virtual FuturePtr proceed(const comm::Group& group) = 0;

  struct Outcome {
    at::Tensor error;   // of this rank, like the input
    at::Tensor finite;  // a bool: whether everything received was finite. Equal on all ranks
  };
  // The second message has arrived: writes the combined gradients. On a thread of the transport.
  virtual Outcome finish(const at::Tensor& gradients) = 0;
  // All of the pass was finite: the exchange becomes part of the hook's state.
  virtual void commit() {}
};

struct TwoRoundsOptions {
  std::string component;  // of its errors
  std::int64_t plain_passes = 0;
  bool use_error_feedback = true;
};

class TwoRounds {
 public:
  TwoRounds(const std::vector<at::Tensor>& parameters, TwoRoundsOptions options);
  TwoRounds(const TwoRounds&) = delete;
  TwoRounds& operator=(const TwoRounds&) = delete;
  virtual ~TwoRounds() = default;

  FuturePtr reduce(const GradientBucket& bucket, const comm::Group& group);
  void set_loss_scale(double scale);
  void save(torch::serialize::OutputArchive& archive);
  void load(torch::serialize::InputArchive& archive);
  void load_resharded(std::span<torch::serialize::InputArchive> saved);

 protected:
  virtual std::shared_ptr<Exchange> make_exchange(CompressedBucket bucket) = 0;
  // Of errors, and of inputs.
  virtual at::ScalarType error_dtype(at::ScalarType gradients) const { return gradients; }
  // The state other than the errors. load_state reads and checks, and returns what sets it.
  virtual void scale_state(double /*factor*/) {}
  virtual void save_state(torch::serialize::OutputArchive&) const {}
  virtual std::function<void()> load_state(torch::serialize::InputArchive&) {
    return [] {};
  }
  // The same for the states of all ranks of a run with a different number of them. `errors` are the
  // means of the ranks' errors. Errors that belong to no current rank may be added to them.
  virtual std::function<void()> load_resharded_state(
      std::span<torch::serialize::InputArchive> saved, std::vector<at::Tensor>& /*errors*/) {
    return load_state(saved.front());
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::string load_component() const { return options_.component + ".load"; }

 private:
  struct Active;
  struct Common {  // equal on all ranks
    std::int64_t passes;
    double loss_scale;
    bool operator==(const Common&) const = default;
  };
  Common read_common(torch::serialize::InputArchive& archive) const;
  std::vector<at::Tensor> read_errors(torch::serialize::InputArchive& archive) const;
  void set(const Common& common, std::vector<at::Tensor> errors,
           const std::function<void()>& set_state);
  void begin_pass();
  void settle();
  std::vector<std::size_t> places_of(const GradientBucket& bucket) const;
  FuturePtr reduce_plainly(const GradientBucket& bucket, const comm::Group& group);
  FuturePtr start(const GradientBucket& bucket, std::vector<std::size_t> places,
                  const comm::Group& group);
  void proceed(const std::shared_ptr<Active>& active, const comm::Group& group);
  CompressedBucket with_errors(const GradientBucket& bucket, std::vector<std::size_t> places,
                               const comm::Group& group) const;

  const TwoRoundsOptions options_;
  const std::vector<at::Tensor> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
  std::int64_t passes_ = 0;
  double loss_scale_ = 0;           // of the errors; 0: set_loss_scale() was not called
  std::vector<at::Tensor> errors_;  // of each parameter, flat; undefined if there is none
  std::vector<std::shared_ptr<Active>> active_;  // of the last pass
  std::shared_ptr<Active> waiting_;              // whose second message is not sent
  bool is_whole_ = false;                        // the last pass reached its last bucket
};

// A future of a tensor on this device.
FuturePtr future_on(c10::Device device);
// One that is completed with this tensor, in place of a message that need not be sent.
FuturePtr completed_with(const at::Tensor& tensor);

// Sets elements beyond the range of fp16 to 0: of errors, which a step in range may have.
void drop_overflows(at::Tensor& errors);

}  // namespace semitone::parallel::detail

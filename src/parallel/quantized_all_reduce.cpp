#include "semitone/parallel/quantized_all_reduce.h"

#include "semitone/core/error.h"
#include "src/comm/process_group.h"
#include "src/core/archive.h"
#include "src/parallel/two_rounds.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

namespace semitone::parallel {
namespace {

constexpr auto kQuantized = "parallel.quantized_all_reduce";
constexpr double kLargest = 127;
// Each rank's part of a bucket is whole blocks, so that larger ones would send mostly padding.
constexpr std::int64_t kLargestBlock = 65536;

// Rows of integers with a scale for each block. A block with an inf or NaN has such a scale.
struct Quantized {
  at::Tensor integers;  // int8[rows, elements]
  at::Tensor scales;    // fp32[rows, blocks]

  std::int64_t block() const { return integers.size(1) / scales.size(1); }

  at::Tensor values(at::ScalarType dtype) const {
    const auto blocks = integers.view({integers.size(0), scales.size(1), block()}).to(dtype);
    return blocks.mul(scales.to(dtype).unsqueeze(2)).view(integers.sizes());
  }

  // uint8[rows, bytes]: the integers of a row, and its scales.
  at::Tensor to_bytes() const {
    return at::cat({integers.view(at::kByte), scales.view(at::kByte)}, 1);
  }

  static Quantized from_bytes(const at::Tensor& bytes, std::int64_t elements) {
    // Copied, since a single row of any length is contiguous, but its scales may not be aligned.
    const at::Tensor scales =
        bytes.narrow(1, elements, bytes.size(1) - elements).clone(at::MemoryFormat::Contiguous);
    return {bytes.narrow(1, 0, elements).contiguous().view(at::kChar), scales.view(at::kFloat)};
  }
};

// @param values  [rows, elements], with a multiple of `block` elements
Quantized quantize(const at::Tensor& values, std::int64_t block) {
  const auto blocks = values.view({values.size(0), -1, block});
  const at::Tensor scales = blocks.abs().amax(2).div_(kLargest).to(at::kFloat);
  const at::Tensor steps = scales.masked_fill(scales == 0, 1).to(values.scalar_type());
  const at::Tensor integers = blocks.div(steps.unsqueeze(2))
                                  .nan_to_num_(0, 0, 0)
                                  .round_()
                                  .clamp_(-kLargest, kLargest)
                                  .to(at::kChar);
  return {integers.view(values.sizes()), scales};
}

// The error of the means of a rank's part of a bucket.
struct PartError {
  std::vector<std::int64_t> parameters;  // of the bucket
  at::Tensor error;
};
using PartErrors = std::map<std::size_t, PartError>;  // by the bucket's index

class QuantizedExchange final : public detail::Exchange {
 public:
  QuantizedExchange(detail::CompressedBucket bucket, const QuantizedAllReduceOptions& options,
                    PartErrors& state)
      : bucket_(std::move(bucket)), options_(options), state_(state) {
    const std::int64_t unit = bucket_.ranks * options_.block_size();
    part_ = (bucket_.input.numel() + unit - 1) / unit * options_.block_size();
  }

  detail::FuturePtr start(const comm::Group& group) override {
    const at::Tensor input = bucket_.input;
    const at::Tensor padded =
        at::constant_pad_nd(input, {0, bucket_.ranks * part_ - input.numel()});
    const Quantized sent = quantize(padded.view({bucket_.ranks, part_}), options_.block_size());
    // In place, since its values are not needed any more.
    error_ = input.sub_(sent.values(input.scalar_type()).view(-1).narrow(0, 0, input.numel()));
    sent_ = sent.to_bytes();
    if (bucket_.ranks == 1) return arrived(sent_);
    received_ = at::empty_like(sent_);
    return comm::start_all_to_all(group, received_, sent_)->getFuture();
  }

  detail::FuturePtr proceed(const comm::Group& group) override {
    const auto dtype = bucket_.input.scalar_type();
    at::Tensor mean = Quantized::from_bytes(received_, part_).values(dtype).mean(0, true);
    const auto earlier = state_.find(bucket_.index);
    if (options_.use_error_feedback() && earlier != state_.end() &&
        earlier->second.parameters == places() && earlier->second.error.numel() == part_)
      mean.add_(earlier->second.error);
    const Quantized sent = quantize(mean, options_.block_size());
    part_error_ = mean.sub(sent.values(dtype)).view(-1);
    std::vector<at::Tensor> inputs{sent.to_bytes()};
    if (bucket_.ranks == 1) return arrived(inputs[0]);
    received_ = at::empty({bucket_.ranks, inputs[0].size(1)}, inputs[0].options());
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (const at::Tensor& row : received_.split(1)) outputs[0].push_back(row);
    return comm::process_group(group)->allgather(outputs, inputs)->getFuture();
  }

  Outcome finish(const at::Tensor& gradients) override {
    const Quantized means = Quantized::from_bytes(received_, part_);
    gradients.copy_(
        means.values(bucket_.input.scalar_type()).view(-1).narrow(0, 0, bucket_.input.numel()));
    sent_.reset();
    received_.reset();
    return {error_, means.scales.isfinite().all()};
  }

  void commit() override {
    if (options_.use_error_feedback()) state_[bucket_.index] = {places(), part_error_};
  }

 private:
  // A single rank, which has no transport, gets what it would send.
  detail::FuturePtr arrived(const at::Tensor& bytes) {
    received_ = bytes;
    return detail::completed_with(bytes);
  }

  std::vector<std::int64_t> places() const {
    return {bucket_.parameters.begin(), bucket_.parameters.end()};
  }

  const detail::CompressedBucket bucket_;
  const QuantizedAllReduceOptions options_;
  PartErrors& state_;
  std::int64_t part_ = 0;  // elements of a rank's part
  at::Tensor error_;
  at::Tensor part_error_;
  at::Tensor sent_;
  at::Tensor received_;
};

}  // namespace

class QuantizedAllReduceHook::Impl final : public detail::TwoRounds {
 public:
  Impl(const std::vector<at::Tensor>& parameters, const QuantizedAllReduceOptions& options)
      : TwoRounds(parameters,
                  {.component = kQuantized, .use_error_feedback = options.use_error_feedback()}),
        options_(options) {}

 protected:
  std::shared_ptr<detail::Exchange> make_exchange(detail::CompressedBucket bucket) override {
    return std::make_shared<QuantizedExchange>(std::move(bucket), options_, part_errors_);
  }

  at::ScalarType error_dtype(at::ScalarType gradients) const override {
    return gradients == at::kDouble ? at::kDouble : at::kFloat;
  }

  void scale_state(double factor) override {
    for (auto& [bucket, part] : part_errors_) part.error.mul_(factor);
  }

  void save_state(torch::serialize::OutputArchive& archive) const override {
    std::vector<std::int64_t> buckets;
    for (const auto& [bucket, part] : part_errors_) {
      buckets.push_back(static_cast<std::int64_t>(bucket));
      archive.write(fmt::format("part_{}", bucket), part.error.clone(), /*is_buffer=*/true);
      archive.write(fmt::format("part_parameters_{}", bucket),
                    torch::tensor(part.parameters, at::kLong), /*is_buffer=*/true);
    }
    archive.write("parts", torch::tensor(buckets, at::kLong), /*is_buffer=*/true);
  }

  std::function<void()> load_state(torch::serialize::InputArchive& archive) override {
    return [this, parts = read_parts(archive)] { part_errors_ = parts; };
  }

  // The error of a part belongs to the mean of the gradients. It has the same effect if each rank adds
  // it to its own gradients.
  std::function<void()> load_resharded_state(std::span<torch::serialize::InputArchive> saved,
                                             std::vector<at::Tensor>& errors) override {
    std::map<std::size_t, std::vector<PartError>> buckets;
    for (torch::serialize::InputArchive& archive : saved) {
      for (auto& [bucket, part] : read_parts(archive)) buckets[bucket].push_back(std::move(part));
    }
    std::set<std::int64_t> seen;
    for (const auto& [bucket, parts] : buckets) {
      require_parts_of_ranks(parts, saved.size());
      const auto& parameters = parts.front().parameters;
      // The state may have buckets of an earlier layout, with higher numbers.
      const bool is_old = std::ranges::any_of(
          parameters, [&](std::int64_t parameter) { return seen.contains(parameter); });
      if (is_old || !options_.use_error_feedback()) continue;
      seen.insert(parameters.begin(), parameters.end());
      add_to(errors, parts);
    }
    return [this] { part_errors_.clear(); };
  }

 private:
  PartErrors read_parts(torch::serialize::InputArchive& archive) const {
    PartErrors parts;
    const at::Device device = parameters().empty() ? at::kCPU : parameters().front().device();
    for (const std::int64_t bucket : read_integers(archive, "parts")) {
      PartError& part = parts[static_cast<std::size_t>(bucket)];
      part.parameters = read_integers(archive, fmt::format("part_parameters_{}", bucket));
      // Copied, since later steps write it.
      part.error = read_value<at::Tensor>(archive, fmt::format("part_{}", bucket), load_component())
                       .to(at::TensorOptions(device), /*non_blocking=*/false, /*copy=*/true);
    }
    return parts;
  }

  // FileError unless the parts are those of a bucket of this hook's parameters, one of each rank.
  void require_parts_of_ranks(const std::vector<PartError>& parts, std::size_t ranks) const {
    std::int64_t elements = 0;
    bool fits = parts.size() == ranks;
    for (const PartError& part : parts) {
      fits = fits && part.parameters == parts.front().parameters && part.error.dim() == 1 &&
             part.error.numel() == parts.front().error.numel();
    }
    const auto count = static_cast<std::int64_t>(parameters().size());
    for (const std::int64_t place : parts.front().parameters) {
      fits = fits && place >= 0 && place < count;
      if (fits) elements += parameters()[static_cast<std::size_t>(place)].numel();
    }
    if (fits && elements <= static_cast<std::int64_t>(ranks) * parts.front().error.numel()) return;
    throw FileError(load_component(),
                    fmt::format("errors of buckets of the hook's parameters, from {} ranks", ranks),
                    "others", "construct the hook with the parameters of the saved run");
  }

  // @param parts  of a bucket, one of each rank
  void add_to(std::vector<at::Tensor>& errors, const std::vector<PartError>& parts) const {
    std::vector<at::Tensor> of_ranks;
    of_ranks.reserve(parts.size());
    for (const PartError& part : parts) of_ranks.push_back(part.error);
    const at::Tensor all = at::cat(of_ranks);
    std::int64_t start = 0;
    for (const std::int64_t number : parts.front().parameters) {
      const auto place = static_cast<std::size_t>(number);
      const std::int64_t elements = parameters()[place].numel();
      const at::Tensor part = all.narrow(0, start, elements);
      errors[place] = errors[place].defined() ? errors[place].add_(part) : part.clone();
      start += elements;
    }
  }

  std::vector<std::int64_t> read_integers(torch::serialize::InputArchive& archive,
                                          const std::string& key) const {
    const at::Tensor numbers =
        read_value<at::Tensor>(archive, key, load_component()).to(at::kCPU, at::kLong).contiguous();
    const auto* const first = numbers.const_data_ptr<std::int64_t>();
    return {first, first + numbers.numel()};
  }

  const QuantizedAllReduceOptions options_;
  PartErrors part_errors_;
};

QuantizedAllReduceHook::QuantizedAllReduceHook(const std::vector<at::Tensor>& parameters,
                                               const QuantizedAllReduceOptions& options) {
  if (options.block_size() < 1 || options.block_size() > kLargestBlock) {
    throw Error(kQuantized, fmt::format("a block_size of 1 to {}", kLargestBlock),
                std::to_string(options.block_size()));
  }
  impl_ = std::make_unique<Impl>(parameters, options);
}

QuantizedAllReduceHook::~QuantizedAllReduceHook() = default;

c10::intrusive_ptr<c10::ivalue::Future> QuantizedAllReduceHook::reduce(const GradientBucket& bucket,
                                                                       const comm::Group& group) {
  return impl_->reduce(bucket, group);
}

void QuantizedAllReduceHook::set_loss_scale(double scale) {
  impl_->set_loss_scale(scale);
}

void QuantizedAllReduceHook::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}

void QuantizedAllReduceHook::load(torch::serialize::InputArchive& archive) {
  impl_->load(archive);
}

void QuantizedAllReduceHook::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  impl_->load_resharded(saved);
}

}  // namespace semitone::parallel

#include "src/report/histogram.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace semitone::report {
namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 20;

// TensorFlow's limits (InitDefaultBucketsInner in tensorflow/core/lib/histogram/histogram.cc).
std::vector<double> make_limits() {
  constexpr double kSmallest = 1e-12;
  constexpr double kLargest = 1e20;
  constexpr double kRatio = 1.1;
  std::vector<double> positive{kSmallest};
  while (positive.back() * kRatio < kLargest) positive.push_back(positive.back() * kRatio);
  positive.push_back(std::numeric_limits<double>::max());
  std::vector<double> limits;
  for (auto limit = positive.rbegin(); limit != positive.rend(); ++limit) limits.push_back(-*limit);
  limits.push_back(0);
  limits.insert(limits.end(), positive.begin(), positive.end());
  return limits;
}

const std::vector<double>& bucket_limits() {
  static const std::vector<double> values = make_limits();
  return values;
}

// All values in one dimension.
at::Tensor flat(const at::Tensor& values) {
  const auto fail = [](const std::string& got) {
    throw Error("report.histogram", "a tensor with real numbers", got);
  };
  if (!values.defined()) fail("an undefined tensor");
  if (values.is_complex() || values.is_quantized()) fail(dtype_name(values.scalar_type()));
  if (values.numel() == 0) fail("no elements");
  at::Tensor dense = values.detach();
  if (dense.layout() == at::kSparse) dense = dense.coalesce().values();
  if (dense.layout() != at::kStrided) dense = dense.to_dense();
  return dense.reshape(-1);
}

// What remains on the device until all pieces are read: the numbers of a Histogram.
class Sums {
 public:
  explicit Sums(c10::Device device)
      : limits_(torch::tensor(bucket_limits(), torch::kDouble).to(device)),
        counts_(torch::zeros(bins(), torch::dtype(torch::kLong).device(device))),
        numbers_(torch::tensor({kInfinity, -kInfinity, 0.0, 0.0}, torch::kDouble).to(device)) {}

  void add(const at::Tensor& piece) {
    const at::Tensor values = piece.to(torch::kDouble);
    const at::Tensor finite = values.isfinite();
    // Bucket i has the values from limit i - 1 to below limit i. A bucket of its own, the last one,
    // has those that are not finite.
    const at::Tensor buckets = at::bucketize(values, limits_, /*out_int32=*/false, /*right=*/true);
    counts_ += at::bincount(at::where(finite, buckets, bins() - 1), {}, bins());
    const at::Tensor summands = at::where(finite, values, 0.0);
    numbers_ = at::stack({at::minimum(numbers_[0], at::where(finite, values, kInfinity).min()),
                          at::maximum(numbers_[1], at::where(finite, values, -kInfinity).max()),
                          numbers_[2] + summands.sum(), numbers_[3] + summands.square().sum()});
  }

  Histogram result() const {
    const at::Tensor counts = counts_.cpu();
    const at::Tensor numbers = numbers_.cpu();
    const std::int64_t* const count = counts.const_data_ptr<std::int64_t>();
    const double* const number = numbers.const_data_ptr<double>();
    Histogram histogram;
    histogram.non_finite = count[bins() - 1];
    // The largest finite value is not below the last limit, but belongs to that bucket.
    std::vector<double> all(count, count + bins() - 2);
    all.back() += static_cast<double>(count[bins() - 2]);
    const auto is_used = [](double value) { return value > 0; };
    const auto first = std::find_if(all.begin(), all.end(), is_used);
    if (first == all.end()) return histogram;
    const auto last = std::find_if(all.rbegin(), all.rend(), is_used).base();
    histogram.counts.assign(first, last);
    histogram.limits.assign(bucket_limits().begin() + (first - all.begin()),
                            bucket_limits().begin() + (last - all.begin()));
    for (const double in_bucket : histogram.counts) histogram.num += in_bucket;
    histogram.min = number[0];
    histogram.max = number[1];
    histogram.sum = number[2];
    histogram.sum_squares = number[3];
    return histogram;
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  // One for each limit, one beyond the last limit, and one for values that are not finite.
  static std::int64_t bins() { return static_cast<std::int64_t>(bucket_limits().size()) + 2; }

  at::Tensor limits_;
  at::Tensor counts_;
  at::Tensor numbers_;  // minimum, maximum, sum, sum of squares
};

}  // namespace

Histogram histogram_of(const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const at::Tensor all = flat(values);
  Sums sums(all.device());
  // A sparse tensor has elements, but perhaps no values.
  for (std::int64_t begin = 0; begin < all.numel(); begin += kPiece)
    sums.add(all.slice(0, begin, std::min(begin + kPiece, all.numel())));
  return sums.result();
}

}  // namespace semitone::report

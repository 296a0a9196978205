#include "semitone/parallel/power_sgd.h"

#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/parallel/two_rounds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>

namespace semitone::parallel {
namespace {

constexpr auto kPowerSGD = "parallel.power_sgd";

// Makes the columns orthonormal, in place: torch's _orthogonalize. Norms of 16-bit columns are in fp32:
// in fp16, that of a column of finite elements may be infinite.
void orthogonalize(at::Tensor& matrix, double epsilon) {
  const std::int64_t rank = matrix.size(1);
  const bool is_wide = matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kDouble;
  if (rank > 2 && is_wide) {
    matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
    return;
  }
  for (std::int64_t i = 0; i < rank; ++i) {
    at::Tensor column = matrix.narrow(1, i, 1);
    const at::Tensor norm = column.norm(2, at::toOpMathType(matrix.scalar_type()));
    column.copy_(column /
                 (epsilon > 0 ? norm + epsilon : norm.masked_fill(norm == 0, 1)).expand_as(column));
    if (i + 1 == rank) return;
    at::Tensor rest = matrix.narrow(1, i + 1, rank - i - 1);
    rest.sub_((column * rest).sum(0, /*keepdim=*/true) * column);
  }
}

// numpy.random.RandomState(seed).randint(1'000'000'000), from which torch takes the seeds of Q.
class SeedSequence {
 public:
  explicit SeedSequence(std::uint32_t seed) : seed_(seed), engine_(seed) {}

  std::uint64_t next() {
    constexpr std::uint32_t kMask = (1U << 30) - 1;
    constexpr std::uint32_t kLargest = 999'999'999;
    for (;;) {
      ++drawn_;
      const auto value = static_cast<std::uint32_t>(engine_()) & kMask;
      if (value <= kLargest) return value;
    }
  }

  std::int64_t drawn() const { return drawn_; }
  void skip_to(std::int64_t drawn) {
    engine_.seed(seed_);
    engine_.discard(static_cast<unsigned long long>(drawn));
    drawn_ = drawn;
  }

 private:
  std::uint32_t seed_;
  std::mt19937 engine_;
  std::int64_t drawn_ = 0;
};

// What is kept between steps, in addition to the errors.
struct PowerSGDState {
  std::vector<at::Tensor> qs;  // of each parameter; undefined if there is none
  SeedSequence seeds;
};

class PowerSGDExchange final : public detail::Exchange {
 public:
  PowerSGDExchange(detail::CompressedBucket bucket, const PowerSGDOptions& options,
                   PowerSGDState& state)
      : bucket_(std::move(bucket)), options_(options), state_(state) {
    divide();
    set_qs();
  }

  detail::FuturePtr start(const comm::Group& group) override {
    std::vector<at::Tensor> sent;
    sent.reserve(vectors_.size() + matrices_.size());
    for (const Vector& vector : vectors_) sent.push_back(input_of(vector));
    for (const Matrix& matrix : matrices_) sent.push_back(at::mm(matrix.input, matrix.q).view(-1));
    first_ = at::cat(sent);
    // The sum is sufficient for P, since it is orthogonalised.
    return group.all_reduce_async(first_).future();
  }

  detail::FuturePtr proceed(const comm::Group& group) override {
    std::int64_t at = 0;
    for (const Vector& vector : vectors_) at += vector.elements;
    first_.narrow(0, 0, at).div_(bucket_.ranks);
    // Before the factors are orthogonalised, which may hide an infinity.
    finite_ = first_.isfinite().all();
    second_ = at::empty({factor_elements_}, first_.options());
    std::int64_t q_at = 0;
    for (Matrix& matrix : matrices_) {
      const std::int64_t rank = matrix.q.size(1);
      matrix.p = first_.narrow(0, at, matrix.input.size(0) * rank).view({-1, rank});
      at += matrix.p.numel();
      orthogonalize(matrix.p, options_.orthogonalization_epsilon());
      at::Tensor q = second_.narrow(0, q_at, matrix.q.numel()).view({-1, rank});
      q_at += q.numel();
      at::mm_out(q, matrix.input.t(), matrix.p);
      matrix.q = q;
    }
    if (matrices_.empty()) return detail::completed_with(first_);
    return group.all_reduce_async(second_, comm::ReduceOp::mean).future();
  }

  Outcome finish(const at::Tensor& gradients) override {
    std::int64_t at = 0;
    for (const Vector& vector : vectors_) {
      gradients.narrow(0, vector.start, vector.elements)
          .copy_(first_.narrow(0, at, vector.elements));
      at += vector.elements;
    }
    for (const Matrix& matrix : matrices_) {
      gradients.narrow(0, matrix.start, matrix.input.numel())
          .copy_(at::mm(matrix.p, matrix.q.t()).view(-1));
    }
    note_whole_factors();
    at::Tensor error = bucket_.input.sub_(gradients);  // its values are not needed any more
    // Means lose nothing.
    for (const Vector& vector : vectors_) error.narrow(0, vector.start, vector.elements).zero_();
    detail::drop_overflows(error);
    return {error, finite_.logical_and(second_.isfinite().all())};
  }

  void commit() override {
    if (!options_.warm_start() || matrices_.empty()) return;
    const at::Tensor are_whole = are_whole_.cpu();
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (are_whole[static_cast<std::int64_t>(i)].item<bool>())
        state_.qs[matrices_[i].place] = matrices_[i].q;
    }
  }

 private:
  struct Vector {  // not compressed
    std::int64_t start;
    std::int64_t elements;
  };
  struct Matrix {
    std::size_t place;
    std::int64_t start;
    at::Tensor input;
    at::Tensor p;
    at::Tensor q;
  };

  at::Tensor input_of(const Vector& vector) const {
    return bucket_.input.narrow(0, vector.start, vector.elements);
  }

  std::int64_t rank_of(std::int64_t rows, std::int64_t columns) const {
    return std::min({rows, columns, options_.matrix_approximation_rank()});
  }

  // Gradients of zeros have a Q of zeros. As the start of the next step it would make P zeros, whatever
  // the gradients are, and so all later steps. The Q of an earlier step stays instead.
  void note_whole_factors() {
    std::vector<at::Tensor> are_whole;
    are_whole.reserve(matrices_.size());
    for (const Matrix& matrix : matrices_) are_whole.push_back(matrix.q.ne(0).any(0).all());
    if (!are_whole.empty()) are_whole_ = at::stack(are_whole);
  }

  // Into vectors, and matrices in torch's order: those of a shape follow the first one.
  void divide() {
    std::int64_t start = 0;
    for (std::size_t i = 0; i < bucket_.parameters.size(); ++i) {
      const at::Tensor& parameter = bucket_.shapes[i];
      const std::int64_t elements = parameter.numel();
      // In the bucket, elements are in the order of the parameter's memory.
      const bool is_transposed = parameter.dim() == 2 &&
                                 parameter.stride(0) < parameter.stride(1) &&
                                 parameter.is_non_overlapping_and_dense();
      const std::int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(is_transposed ? 1 : 0);
      const std::int64_t columns = rows == 0 ? 0 : elements / rows;
      const auto compressed = static_cast<double>((rows + columns) * rank_of(rows, columns));
      if (compressed * options_.min_compression_rate() < static_cast<double>(rows * columns)) {
        Matrix matrix{bucket_.parameters[i],
                      start,
                      bucket_.input.narrow(0, start, elements).view({rows, columns}),
                      {},
                      {}};
        const auto last = std::find_if(
            matrices_.rbegin(), matrices_.rend(),
            [&](const Matrix& earlier) { return earlier.input.sizes() == matrix.input.sizes(); });
        matrices_.insert(last == matrices_.rend() ? matrices_.end() : last.base(),
                         std::move(matrix));
      } else {
        vectors_.push_back({start, elements});
      }
      start += elements;
    }
  }

  // Those of the last step, and random ones where there is none: equal on all ranks. A matrix whose
  // gradients are always zero never has one.
  void set_qs() {
    const auto shape_of = [this](const Matrix& matrix) {
      const std::int64_t columns = matrix.input.size(1);
      return std::array{columns, rank_of(matrix.input.size(0), columns)};
    };
    const auto is_warm = [&](const Matrix& matrix) {
      const at::Tensor& q = state_.qs[matrix.place];
      return q.defined() && q.sizes() == at::IntArrayRef(shape_of(matrix));
    };
    at::Generator generator;
    if (!std::ranges::all_of(matrices_, is_warm))
      generator = at::make_generator<at::CPUGeneratorImpl>(state_.seeds.next());
    for (Matrix& matrix : matrices_) {
      const auto& options = bucket_.input.options();
      matrix.q = is_warm(matrix) ? state_.qs[matrix.place].clone()
                                 : at::randn(shape_of(matrix), generator, options.device(at::kCPU))
                                       .to(options.device());
      orthogonalize(matrix.q, options_.orthogonalization_epsilon());
      factor_elements_ += matrix.q.numel();
    }
  }

  const detail::CompressedBucket bucket_;
  const PowerSGDOptions options_;
  PowerSGDState& state_;
  std::vector<Vector> vectors_;
  std::vector<Matrix> matrices_;
  std::int64_t factor_elements_ = 0;
  at::Tensor first_;   // the vectors, and P of each matrix
  at::Tensor second_;  // Q of each matrix
  at::Tensor finite_;
  at::Tensor are_whole_;  // for each matrix: whether its Q has no column of zeros
};

void check_options(const PowerSGDOptions& options) {
  const auto require = [](bool right, const char* expected, double got) {
    if (!right) throw Error(kPowerSGD, expected, fmt::format("{}", got));
  };
  require(options.matrix_approximation_rank() >= 1, "a matrix_approximation_rank of 1 or more",
          static_cast<double>(options.matrix_approximation_rank()));
  require(options.start_powerSGD_iter() >= 0, "a start_powerSGD_iter of 0 or more",
          static_cast<double>(options.start_powerSGD_iter()));
  require(options.min_compression_rate() > 0, "a min_compression_rate greater than 0",
          options.min_compression_rate());
  require(options.orthogonalization_epsilon() >= 0, "an orthogonalization_epsilon of 0 or more",
          options.orthogonalization_epsilon());
}

}  // namespace

class PowerSGDHook::Impl final : public detail::TwoRounds {
 public:
  Impl(const std::vector<at::Tensor>& parameters, const PowerSGDOptions& options)
      : TwoRounds(parameters, {.component = kPowerSGD,
                               .plain_passes = options.start_powerSGD_iter(),
                               .use_error_feedback = options.use_error_feedback()}),
        options_(options),
        state_{std::vector<at::Tensor>(parameters.size()), SeedSequence(options.random_seed())} {}

 protected:
  std::shared_ptr<detail::Exchange> make_exchange(detail::CompressedBucket bucket) override {
    return std::make_shared<PowerSGDExchange>(std::move(bucket), options_, state_);
  }

  void save_state(torch::serialize::OutputArchive& archive) const override {
    archive.write("drawn", c10::IValue(state_.seeds.drawn()));
    for (std::size_t place = 0; place < state_.qs.size(); ++place) {
      if (state_.qs[place].defined())
        archive.write(fmt::format("q_{}", place), state_.qs[place].clone(), /*is_buffer=*/true);
    }
  }

  std::function<void()> load_state(torch::serialize::InputArchive& archive) override {
    const auto drawn = read_value<std::int64_t>(archive, "drawn", load_component());
    constexpr std::int64_t kMostDrawn = 1'000'000'000;  // skipped in seconds
    if (drawn < 0 || drawn > kMostDrawn) {
      throw FileError(load_component(), fmt::format("0 to {} drawn seeds", kMostDrawn),
                      std::to_string(drawn));
    }
    std::vector<at::Tensor> qs(parameters().size());
    for (std::size_t place = 0; place < qs.size(); ++place) {
      const auto q = find_value<at::Tensor>(archive, fmt::format("q_{}", place), load_component());
      // One of another rank is replaced by random numbers in the next step.
      if (q.has_value()) qs[place] = q->to(parameters()[place].options()).detach();
    }
    return [this, drawn, qs = std::move(qs)] {
      state_.qs = qs;
      state_.seeds.skip_to(drawn);
    };
  }

 private:
  const PowerSGDOptions options_;
  PowerSGDState state_;
};

PowerSGDHook::PowerSGDHook(const std::vector<at::Tensor>& parameters,
                           const PowerSGDOptions& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(parameters, options);
}

PowerSGDHook::~PowerSGDHook() = default;

c10::intrusive_ptr<c10::ivalue::Future> PowerSGDHook::reduce(const GradientBucket& bucket,
                                                             const comm::Group& group) {
  return impl_->reduce(bucket, group);
}

void PowerSGDHook::set_loss_scale(double scale) {
  impl_->set_loss_scale(scale);
}

void PowerSGDHook::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}

void PowerSGDHook::load(torch::serialize::InputArchive& archive) {
  impl_->load(archive);
}

void PowerSGDHook::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  impl_->load_resharded(saved);
}

}  // namespace semitone::parallel

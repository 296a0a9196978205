// Matrix products and convolutions: oneDNN's and MKL's, except for the gradients of 1 x 1
// convolutions.
#include "benchmarks/kernels/differentiable.h"
#include "benchmarks/support/check.h"
#include "src/nn/conv1x1.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <array>

namespace semitone::bench {
namespace {

// Sums in fp32 of up to 50,000 products.
constexpr Tolerance kProducts{.share_of_largest = 1e-5};

// (m, k) by (k, n).
struct Product {
  const char* use;
  const char* layout;  // N: row by row, T: column by column
  std::int64_t m, k, n;
};

std::vector<Row> matmul(const Product& of, at::ScalarType dtype) {
  const auto random = [&](std::int64_t rows, std::int64_t columns, char layout) {
    return layout == 'N' ? torch::randn({rows, columns}).to(dtype)
                         : torch::randn({columns, rows}).to(dtype).t();
  };
  const at::Tensor a = random(of.m, of.k, of.layout[0]);
  const at::Tensor b = random(of.k, of.n, of.layout[1]);
  require_within(at::mm(a, b), at::mm(a.to(at::kDouble), b.to(at::kDouble)), kProducts,
                 "a product");
  return {{.pass = of.use,
           .operations = 2 * static_cast<double>(of.m) * static_cast<double>(of.k) *
                         static_cast<double>(of.n),
           .work = [a, b] { at::mm(a, b); }}};
}

struct Convolution {
  std::int64_t from, to, kernel, edge, stride = 1;

  std::array<std::int64_t, 2> strides() const { return {stride, stride}; }
  std::array<std::int64_t, 2> padding() const { return {kernel / 2, kernel / 2}; }

  at::Tensor operator()(const at::Tensor& image, const at::Tensor& weight) const {
    return at::conv2d(image, weight, {}, strides(), padding());
  }
  // The gradient of the image or of the weight.
  at::Tensor gradient(const at::Tensor& grad, const at::Tensor& image, const at::Tensor& weight,
                      bool of_image) const {
    const auto both = at::convolution_backward(grad, image, weight, std::nullopt, strides(),
                                               padding(), {1, 1}, /*transposed=*/false, {0, 0},
                                               /*groups=*/1, {of_image, !of_image, false});
    return of_image ? std::get<0>(both) : std::get<1>(both);
  }
  std::string name() const {
    return fmt::format("conv {0}x{0}{1} {2} to {3}", kernel,
                       stride == 1 ? "" : fmt::format("/{}", stride), from, to);
  }
};

// The gradient as a region computes it.
std::function<at::Tensor()> gradient_work(const Convolution& of, const at::Tensor& image,
                                          const at::Tensor& weight, const at::Tensor& grad,
                                          bool of_image) {
  if (of.kernel != 1) return [=] { return of.gradient(grad, image, weight, of_image); };
  const at::Tensor x = image.detach().requires_grad_(of_image);
  const at::Tensor w = weight.detach().requires_grad_(!of_image);
  return [leaf = of_image ? x : w, y = nn::conv1x1(x, w, {}, of.strides()), grad] {
    return torch::autograd::grad({y}, {leaf}, {grad}, /*retain_graph=*/true)[0];
  };
}

std::vector<Row> convolution(const Convolution& of, std::int64_t images) {
  const auto random = [](at::IntArrayRef shape) {
    return torch::randn(shape).to(at::kBFloat16).contiguous(at::MemoryFormat::ChannelsLast);
  };
  const at::Tensor x = random({images, of.from, of.edge, of.edge});
  const at::Tensor w = random({of.to, of.from, of.kernel, of.kernel});
  const at::Tensor y = of(x, w);
  const at::Tensor grad = random(y.sizes());
  const double operations = 2 * static_cast<double>(y.numel()) * static_cast<double>(w.numel()) /
                            static_cast<double>(of.to);

  const auto exact = [](const at::Tensor& tensor) { return tensor.to(at::kDouble); };
  require_within(y, of(exact(x), exact(w)), kProducts, "a convolution");
  std::vector<Row> rows{{.pass = "forward", .operations = operations, .work = [=] { of(x, w); }}};
  for (const bool of_image : {true, false}) {
    const auto gradient = gradient_work(of, x, w, grad, of_image);
    require_within(gradient(), of.gradient(exact(grad), exact(x), exact(w), of_image), kProducts,
                   of_image ? "the input's gradient" : "the weight's gradient");
    Row row{.pass = of_image ? "input" : "weight", .operations = operations, .work = [gradient] {
              gradient();
            }};
    if (of.kernel == 1) row.libtorchs = [=] { of.gradient(grad, x, w, of_image); };
    rows.push_back(row);
  }
  return rows;
}

}  // namespace

void add_products(std::vector<Case>& cases, const Sizes& sizes) {
  const std::int64_t small = sizes.matrix;
  const std::int64_t large = 4 * small;
  // A linear layer keeps its weight as (out, in).
  const Product products[] = {
      {"NN", "NN", small, small, small},          {"NT", "NT", small, small, small},
      {"TN", "TN", small, small, small},          {"NT, forward", "NT", small, small, large},
      {"NN, input", "NN", small, large, small},   {"TN, weight", "TN", large, small, small},
      {"NT, forward", "NT", small, large, small}, {"NN, input", "NN", small, small, large},
      {"TN, weight", "TN", small, small, large}};
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    for (const Product& of : products) {
      cases.push_back(
          {"matmul", dtype, name_of_shape({of.m, of.k, of.n}), [=] { return matmul(of, dtype); }});
    }
  }
  // The convolutions of ResNet-50.
  for (const Convolution& of : {Convolution{64, 64, 3, 56},
                                {128, 128, 3, 28},
                                {256, 256, 3, 14},
                                {512, 512, 3, 7},
                                {256, 64, 1, 56},
                                {2048, 512, 1, 7},
                                {256, 512, 1, 56, 2}}) {
    cases.push_back({of.name(), at::kBFloat16,
                     name_of_shape({sizes.images, of.from, of.edge, of.edge}),
                     [=] { return convolution(of, sizes.images); }});
  }
}

}  // namespace semitone::bench

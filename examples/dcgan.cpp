// DCGAN on MNIST, as in Apex's example: two models, two optimizers, and three losses with a loss
// scale each. It writes a picture of generated digits. In PyTorch: python/dcgan.py.
//
//   dcgan [STEPS] [PICTURE.pgm] [O0|O1|O2] [DATA_DIR]
//
// After 300 steps the picture shows strokes, after 1200 digits.
#include <semitone/semitone.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <iostream>

namespace amp = semitone::amp;
namespace nn = torch::nn;
namespace zoo = semitone::zoo;

namespace {

constexpr int64_t batch = 64;
constexpr int64_t noise_size = 64;

nn::ConvTranspose2d up(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding) {
  return nn::ConvTranspose2d(
      nn::ConvTranspose2dOptions(in, out, kernel).stride(stride).padding(padding).bias(false));
}

nn::Conv2d down(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t padding) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(padding).bias(false));
}

nn::LeakyReLU leaky() {
  return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2));
}

// Noise (N, 64, 1, 1) to images (N, 1, 28, 28) from -1 to 1.
nn::Sequential make_generator() {
  return nn::Sequential(up(noise_size, 64, 4, 1, 0), nn::BatchNorm2d(64), nn::ReLU(),  // 4 x 4
                        up(64, 32, 3, 2, 1), nn::BatchNorm2d(32), nn::ReLU(),          // 7 x 7
                        up(32, 16, 4, 2, 1), nn::BatchNorm2d(16), nn::ReLU(),          // 14 x 14
                        up(16, 1, 4, 2, 1), nn::Tanh());                               // 28 x 28
}

// Images to logits (N, 1, 1, 1): positive for real ones.
nn::Sequential make_discriminator() {
  return nn::Sequential(down(1, 16, 4, 2, 1), leaky(),                        // 14 x 14
                        down(16, 32, 4, 2, 1), nn::BatchNorm2d(32), leaky(),  // 7 x 7
                        down(32, 64, 4, 2, 1), nn::BatchNorm2d(64), leaky(),  // 3 x 3
                        down(64, 1, 3, 1, 0));
}

void initialize_convolutions(nn::Sequential& model) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    if (parameter.dim() == 4) parameter.normal_(0, 0.02);
  }
}

torch::Tensor real_images(const zoo::ImageSet& data, int64_t step) {
  const auto images = data.images.narrow(0, step * batch % (data.size() - batch), batch);
  return images.unsqueeze(1).to(torch::kFloat).div_(127.5).sub_(1);
}

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

// Writes 64 images as a grid of 8 x 8, in the format of netpbm.
bool write_picture(const std::string& file, const torch::Tensor& images) {
  const auto rows = images.view({8, 8, 28, 28}).transpose(1, 2).reshape({8 * 28, 8 * 28});
  const auto bytes = rows.add(1).mul(127.5).round().to(torch::kByte).contiguous();
  std::ofstream stream(file, std::ios::binary);
  stream << "P5\n224 224\n255\n";
  stream.write(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
  return bool(stream.flush());
}

}  // namespace

int main(int argc, char** argv) try {
  const int64_t steps = argc > 1 ? std::stoll(argv[1]) : 300;
  const std::string picture = argc > 2 ? argv[2] : "dcgan.pgm";
  const std::string level = argc > 3 ? argv[3] : "O1";
  const auto data = zoo::load_mnist(argc > 4 ? argv[4] : "data/mnist", zoo::Split::train);
  const auto device = semitone::default_device();
  torch::manual_seed(0);
  auto generator = make_generator();
  auto discriminator = make_discriminator();
  for (auto* model : {&generator, &discriminator}) {
    initialize_convolutions(*model);
    (*model)->to(device);
  }
  const auto options = torch::optim::AdamOptions(2e-3).betas({0.5, 0.999});
  torch::optim::Adam optimizer_g(generator->parameters(), options);
  torch::optim::Adam optimizer_d(discriminator->parameters(), options);
  auto mixed = amp::initialize({generator, discriminator}, {optimizer_g, optimizer_d},
                               amp::Options(level).dtype(torch::kHalf).num_losses(3).verbosity(0));

  const auto noise = [&] { return torch::randn({batch, noise_size, 1, 1}, device); };
  const auto fixed_noise = noise();
  const auto samples = [&] {
    const torch::NoGradGuard no_grad;
    return mixed.forward(generator, fixed_noise).to(torch::kCPU);
  };
  const auto untrained = samples();
  double loss_d = 0;
  double loss_g = 0;
  bool finite = true;
  for (int64_t step = 0; step < steps; ++step) {
    // The discriminator learns to tell the images apart.
    optimizer_d.zero_grad();
    const auto real = mixed.forward(discriminator, real_images(data, step).to(device));
    const auto loss_real = loss_of(real, 1);
    mixed.scale_loss(loss_real, optimizer_d, amp::ScaleLossOptions().loss_id(0)).backward();
    const auto fake = mixed.forward(generator, noise());
    const auto loss_fake = loss_of(mixed.forward(discriminator, fake.detach()), 0);
    mixed.scale_loss(loss_fake, optimizer_d, amp::ScaleLossOptions().loss_id(1)).backward();
    mixed.step(optimizer_d);

    // The generator learns to deceive it.
    optimizer_g.zero_grad();
    const auto deceived = loss_of(mixed.forward(discriminator, fake), 1);
    mixed.scale_loss(deceived, optimizer_g, amp::ScaleLossOptions().loss_id(2)).backward();
    mixed.step(optimizer_g);

    loss_d = (loss_real + loss_fake).item<double>();
    loss_g = deceived.item<double>();
    finite = finite && std::isfinite(loss_d) && std::isfinite(loss_g);
    if (step % 20 == 0) {
      std::cout << "step " << step << ": losses " << loss_d << " of the discriminator, " << loss_g
                << " of the generator\n";
    }
  }
  const auto trained = samples();
  if (!write_picture(picture, trained)) {
    std::cerr << "cannot write " << picture << '\n';
    return 1;
  }

  // The images come closer to the real ones: their brightness, and how much it varies.
  const auto digits = real_images(data, 0);
  const auto distance = [&](const torch::Tensor& images) {
    return std::abs((images.mean() - digits.mean()).item<double>()) +
           std::abs((images.std() - digits.std()).item<double>());
  };
  std::cout << "mean " << trained.mean().item<double>() << " (" << digits.mean().item<double>()
            << "), deviation " << trained.std().item<double>() << " ("
            << digits.std().item<double>() << "), distance " << distance(untrained) << " -> "
            << distance(trained) << "; scales " << mixed.loss_scaler(0).scale() << ", "
            << mixed.loss_scaler(1).scale() << ", " << mixed.loss_scaler(2).scale() << ", skipped "
            << mixed.skipped_steps() << '\n';
  return finite && distance(trained) < 0.75 * distance(untrained) ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

#pragma once

#include "semitone/autocast/cast_action.h"
#include "semitone/autocast/fp8_options.h"
#include "semitone/autocast/fp8_scaling.h"
#include "semitone/autocast/model.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::amp {

/// Paddle's levels. O1 casts by an allow list and a block list. O2 has the same allow list, and its
/// block list only has operators that are slower in 16 bits. The others run in the widest dtype of
/// their arguments.
enum class PaddleLevel { O1, O2 };

class CompiledPolicy;

/// Decides in which precision autocast runs each operator. A policy is a value: a table from
/// operator to action, with a reason for each row.
///
///     auto policy =
///         CastPolicy::semitone(torch::kBFloat16)
///             .lower("softmax").keep_fp32("mylib::my_op").keep_fp32_params("head.*");
///     amp::Autocast region(policy.bind(*model));
///
/// Operators are named by their ATen names: "conv2d" means all its overloads, "conv2d.padding" one
/// of them, and "mylib::my_op" an operator of another library (TORCH_LIBRARY). An unknown name is
/// an Error that suggests similar names. Operators that are not in the table run in the dtypes of
/// their arguments. Only out-of-place operators can be cast. In-place operators and out= overloads
/// write to a tensor that the caller chose, so they accept only ban() and leave().
///
/// In C++, torch::nn::Linear and functional::linear call addmm (2-D input with bias) or matmul, not
/// linear. To change the precision of single layers, pass their parameters' names to
/// keep_fp32_params().
///
/// `semitone ops` prints the tables.
class CastPolicy {
 public:
  /// The default policy. On a GPU it is LibTorch's own list. On a CPU it has the same rows, except
  /// for five operators: layer_norm, native_layer_norm, group_norm, binary_cross_entropy and
  /// grid_sampler. It also has the rows that only LibTorch's CPU list has, and operators that
  /// LibTorch's CPU cannot compute in 16 bits (det, logdet, matrix_exp …), in fp32. Mixed dtypes that
  /// raise errors under LibTorch's CPU list (mv, dot, index_put, scatter_add, bilinear) do not raise
  /// under this policy. docs/cast_policies.md lists the differences between the devices.
  static CastPolicy semitone(CastTarget target = {});
  /// LibTorch's own list for the device, unchanged.
  static CastPolicy torch(CastTarget target = {});
  /// The lists of functions that apex.amp O1 patches (commit e13873de), translated to the ATen
  /// operators that these functions call.
  static CastPolicy apex(CastTarget target = {});
  /// The lists of paddle.amp 3.3, translated to the corresponding ATen operators.
  static CastPolicy paddle(CastTarget target = {}, PaddleLevel level = PaddleLevel::O1);
  /// An empty table, for models with 16-bit weights (O2, O3). A region with it still computes 16-bit
  /// matrix products by Emulation, casts fp32 that meets 16 bits in products, recurrent networks,
  /// normalisation layers and prelu, and computes in fp32 what LibTorch cannot compute in 16 bits.
  static CastPolicy none(CastTarget target = {});
  /// Returns the preset with this name. Error for a name that is not in preset_names().
  static CastPolicy by_name(std::string_view name, CastTarget target = {});
  /// The names of all presets.
  static std::vector<std::string> preset_names();
  /// Returns the policy in a file, for a device and dtype. save() writes such files;
  /// docs/cast_policies.md describes the format. FileError if the file cannot be read, is not in
  /// this format, or names a preset or an operator that does not exist here.
  static CastPolicy from_file(const std::filesystem::path& path, CastTarget target = {});

  /// Edits of the table. Each adds a row or replaces the existing one. Error for an unknown
  /// operator.
  CastPolicy& lower(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& keep_fp32(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& promote(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& widest(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& leave(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& ban(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& set(std::string_view op, CastAction action,
                  std::string_view reason = "set by the user");

  /// Keeps the parameters whose names match a glob (*, ?, [abc]; * also matches dots) in fp32.
  /// Operators that get such a parameter as an argument then run in fp32, if this policy lists them
  /// with any action, or if the preset `semitone` lists them for the device. Such an operator
  /// also accepts 16-bit tensors next to the parameter, under every policy, including the preset
  /// `none`, which O2 and O3 use. For operators in neither list, and for those that write to an
  /// argument (in-place forms, out= overloads), LibTorch's type promotion decides.
  ///
  /// Names need a model: see bind(). In a policy that is already bound the glob is resolved at once
  /// (Error if it matches nothing). Autocast refuses a policy with globs that is not bound.
  /// amp::initialize binds the policy itself.
  CastPolicy& keep_fp32_params(std::string_view glob);

  /// Sets which 16-bit operators are emulated. Default: Emulation::automatic.
  CastPolicy& emulation(Emulation value);

  /// Whether an operator runs in Semitone's own kernel if that supports the arguments. Most of
  /// these kernels take one pass over memory instead of several (docs/cast_policies.md). They run
  /// on the CPU, and `view` on every device; models need no change. Their results equal those of
  /// LibTorch's operators within rounding, and can be differentiated as often. Dropout draws other
  /// random numbers from the same generator. The table's rows still decide the dtypes.
  ///
  /// fast_kernel sets one operator, and is an Error for an operator without such a kernel.
  /// fast_kernels sets all of them. Default: all on in the presets semitone and `none`. All off in
  /// the others, which compute what their systems do. `semitone ops` lists the operators for which
  /// it is on.
  CastPolicy& fast_kernel(std::string_view op, bool on = true);
  CastPolicy& fast_kernels(bool on);

  /// Whether those of the fast kernels that exist for GPUs run there too: batch_norm,
  /// cross_entropy_loss, gelu, layer_norm and rms_norm, on GPUs that Semitone's CUDA kernels
  /// support. fast_kernel() chooses among them. Default: false, since these kernels have not been
  /// measured beside LibTorch's and cuDNN's.
  CastPolicy& fast_kernels_on_gpu(bool on);

  /// Computes products of weights in fp8 where this policy computes them in 16 bits: linear layers,
  /// mm, addmm, matmul and convolutions, with weights that are parameters, or views of parameters,
  /// of the model that the policy is bound to. Inputs and weights are rounded to one format,
  /// gradients of the results to another (Fp8Options), and products are summed in fp32. The dtypes of
  /// results, and all other operators, do not change. docs/fp8.md lists the products that stay in
  /// 16 bits, those of recurrent layers and of attention among them.
  ///
  /// fp8 is emulated: the numbers are those of hardware with fp8, on every processor and device, up
  /// to the order of summation, at a lower speed than in fp32 (docs/fp8.md).
  ///
  /// The scales need a model: see bind(). In a policy that is already bound they start at once.
  /// amp::initialize binds the policy that it gets anew: use MixedPrecision::fp8_scaling() then.
  /// Autocast refuses a policy with fp8 that is not bound. Error for options out of range, and, in
  /// bind(), for a glob that matches no parameter.
  CastPolicy& fp8(const Fp8Options& options = {});

  /// Returns the policy for the parameters of a model: resolves the globs (Error if one matches
  /// nothing), starts the scales of fp8, and lets the weight cache keep frozen parameters too. The
  /// policy refers to the parameters, and does not own them.
  CastPolicy bind(const Model& model) const;
  /// The same for several models: each glob must match in one of them.
  CastPolicy bind(const std::vector<Model>& models) const;

  /// Returns the same preset for another device or dtype, with the same edits. Its rows are the
  /// preset's rows for that device.
  CastPolicy with_target(CastTarget target) const;

  /// Writes the preset's name and the edits to a file, as JSON: a whole file or nothing (FileError).
  /// The device, the dtype and the binding to a model are not in it.
  void save(const std::filesystem::path& path) const;
  /// Returns the content of that file.
  std::string to_json() const;
  /// Returns an expression in C++ that makes this policy, without the binding:
  /// `CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).keep_fp32("softmax")`.
  std::string to_code() const;

  std::string_view name() const { return name_; }
  c10::DeviceType device() const { return target_.device; }
  c10::ScalarType dtype() const { return target_.dtype; }
  Emulation emulation() const { return emulation_; }
  /// The operators for which fast_kernel() is on.
  const std::set<std::string>& fast_kernels() const { return fast_kernels_; }
  bool fast_kernels_on_gpu() const { return fast_kernels_on_gpu_; }
  const std::vector<std::string>& fp32_param_globs() const { return globs_; }
  /// The options of fp8(); std::nullopt without it.
  const std::optional<Fp8Options>& fp8_options() const { return fp8_; }
  /// The scales of fp8(), which copies of this policy share. Error without fp8(), and in a policy
  /// that is not bound.
  Fp8Scaling fp8_scaling() const;

  /// Whether bind() was called, and the globs are resolved.
  bool is_bound() const { return binding_ != nullptr; }
  /// Whether this parameter stays in fp32, as found by bind().
  bool keeps_fp32(const at::Tensor& parameter) const;

  /// Returns the row of an operator, or std::nullopt if it is not listed. Here "conv2d" means the
  /// overload without a name.
  std::optional<CastRow> find(std::string_view op) const;
  /// Returns all rows, sorted by operator: "conv2d", "conv2d.padding", "mylib::my_op".
  /// The reference is valid until the next edit, or the end of the policy.
  const std::map<std::string, CastRow>& rows() const;

  /// For the library itself: the table in the form that the dispatcher's kernels read.
  std::shared_ptr<const CompiledPolicy> compiled() const;

 private:
  friend class PolicyBuilder;
  struct NamedParameter;
  struct Preset;    // its rows for one device, shared by all policies made of it
  struct Compiled;  // made at first use, shared by copies, replaced by edits

  using Binding = std::vector<NamedParameter>;  // the parameters of bind()
  using Rows = std::map<std::string, CastRow>;

  CastPolicy(std::string name, CastTarget target, std::shared_ptr<const Preset> preset);
  void start_fp8();
  static void keep_matching(Binding& binding, const std::string& glob);
  void edited();
  std::vector<std::pair<std::string, CastRow>> edits_by_name() const;
  std::shared_ptr<const CompiledPolicy> compile() const;

  std::string name_;
  CastTarget target_;
  std::shared_ptr<const Preset> preset_;
  Rows edits_;  // rows in place of the preset's
  std::vector<std::string> globs_;
  Emulation emulation_ = Emulation::automatic;
  std::set<std::string> fast_kernels_;
  bool fast_kernels_on_gpu_ = false;
  std::optional<Fp8Options> fp8_;
  std::shared_ptr<const Binding> binding_;
  std::shared_ptr<Fp8State> fp8_state_;
  std::shared_ptr<Compiled> compiled_;
};

}  // namespace semitone::amp

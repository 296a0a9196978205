#pragma once

/// The C interface of Semitone, for bindings of other languages: the library `libsemitone_c`. This
/// header compiles as C99 and as C++, and needs no header of LibTorch. docs/c_interface.md has
/// examples.
///
/// - **Status.** Every function that can fail returns a SemitoneStatus. semitone_last_error()
///   returns the message. No C++ exception leaves a function. After an error nothing is changed,
///   unless the function's comment says otherwise, and results are not written.
/// - **Handles.** An object is a pointer to an incomplete struct. `…_create` and `…_load` functions
///   make it, and the function `…_destroy` of the same type destroys it; null is allowed there.
///   Regions begin with `…_enter` and end with `…_exit`, for which null is an error. Elsewhere a null
///   pointer is an error unless the comment allows it. A handle of another type and a destroyed
///   handle are errors in all functions. A destroyed handle is not recognised once a new one has its
///   address.
/// - **Tensors.** A `SemitoneTensor*` is a pointer to LibTorch's C++ class at::Tensor
///   (torch::Tensor). That is the pointer that Rust's tch (`Tensor::as_ptr`), C#'s TorchSharp
///   (`Tensor.Handle`) and Java's javacpp-presets (`Pointer.address`) hold. Semitone does not take
///   ownership of tensors that are passed to it. A result in a `SemitoneTensor**` is allocated with
///   C++'s `new` and belongs to the caller: wrap it in the binding's own class, which deletes it,
///   or call semitone_tensor_destroy().
/// - **Lists** are a pointer and a count. The pointer may be null if the count is 0.
/// - **Devices** are LibTorch's names: "cpu", "cuda", "cuda:1". Null is the default device.
/// - **Strings** are UTF-8 and end with a zero byte. Arguments are not kept.
/// - **Threads.** Different handles may be used on different threads at the same time. A handle,
///   and the tensors that it refers to, may be used by one thread at a time. A group counts as one
///   handle with the scalers and ddps that hold it, and with a backward pass of such a ddp: ranks
///   must call collectives in one order. Regions, grad mode and semitone_last_error() belong to the
///   thread. End a region before its thread ends: its handle can not be destroyed afterwards.
///   Loading the library, the first region of a policy, and the first one after
///   semitone_policy_set() may change LibTorch's table of operators, which no other thread may use
///   at that moment: load the library before other threads start, and with several policies, enter
///   a region of each once.
/// - **Processes.** dlclose() does not unload the library, since LibTorch calls its kernels until the
///   process ends. After fork(), use it in the child only if no other thread was in a call.
///
/// A process may load this library or link Semitone's C++ libraries, not both: each registers the
/// same operators with LibTorch. LibTorch must have the release that semitone_libtorch_version()
/// returns, and be loaded only once.

#include <stddef.h>  // NOLINT(modernize-deprecated-headers): this is C
#include <stdint.h>  // NOLINT(modernize-deprecated-headers)

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__  // also where a program hides its own functions
#pragma GCC visibility push(default)
#endif

/// The result of a call. Values are not reused for other meanings in later versions. If LibTorch
/// finds no memory on the CPU, it says so by an error like its others: SEMITONE_LIBTORCH_ERROR.
typedef int32_t SemitoneStatus;  // NOLINT(modernize-use-using)
enum {
  SEMITONE_OK = 0,
  SEMITONE_ERROR = 1,           ///< wrong use: C++'s semitone::Error
  SEMITONE_FILE_ERROR = 2,      ///< unreadable or damaged data: FileError
  SEMITONE_COMM_ERROR = 3,      ///< a rank is lost or late: CommError
  SEMITONE_DIVERGED_ERROR = 4,  ///< too many consecutive skipped steps: DivergedError
  SEMITONE_LIBTORCH_ERROR = 5,  ///< an error of LibTorch, such as shapes that do not match
  SEMITONE_OTHER_ERROR = 6      ///< anything else, such as lack of memory on a GPU
};

/// Dtypes have the numbers of LibTorch's c10::ScalarType, as in the other bindings. Only these can
/// be passed to semitone_tensor_create() and semitone_tensor_read().
enum {
  SEMITONE_DEFAULT_DTYPE = -1,  ///< of a policy: bf16 on a CPU, fp16 on other devices
  SEMITONE_UINT8 = 0,
  SEMITONE_INT8 = 1,
  SEMITONE_INT16 = 2,
  SEMITONE_INT32 = 3,
  SEMITONE_INT64 = 4,
  SEMITONE_FLOAT16 = 5,
  SEMITONE_FLOAT32 = 6,
  SEMITONE_FLOAT64 = 7,
  SEMITONE_BOOL = 11,
  SEMITONE_BFLOAT16 = 15
};

typedef struct SemitoneTensor SemitoneTensor;    ///< at::Tensor
typedef struct SemitonePolicy SemitonePolicy;    ///< which operators autocast casts, and to what
typedef struct SemitoneRegion SemitoneRegion;    ///< the scope of an autocast
typedef struct SemitoneScaler SemitoneScaler;    ///< a loss scale: GradScaler
typedef struct SemitoneMasters SemitoneMasters;  ///< fp32 copies of 16-bit parameters
typedef struct SemitoneGroup SemitoneGroup;      ///< processes that communicate
typedef struct SemitoneDdp SemitoneDdp;          ///< DistributedDataParallel for a list of tensors

/// An option by its name in C++, with a numeric value: booleans are 0 and 1.
typedef struct SemitoneOption {
  const char* name;
  double value;
} SemitoneOption;

/// Returns the version of Semitone ("0.1.0") and the release of LibTorch that it was built with
/// ("2.11.0"). The strings are constants.
const char* semitone_version(void);
const char* semitone_libtorch_version(void);

/// Returns the message of the last call on this thread that failed: "[amp.grad_scaler.unscale_]
/// expected …, got … — remedy", in at most 4095 bytes of UTF-8. Empty before the first error. The
/// pointer is valid until the next error on this thread, or its end.
const char* semitone_last_error(void);

/// Frees memory that a function of this header returned in a `char**`. Null is allowed.
void semitone_free(char* memory);

// Tensors and operators: what callers without a binding of LibTorch need. Others need none of it.

/// Creates a tensor on the CPU with a copy of `data`: `sizes` in elements, row-major, without gaps.
/// Error unless `bytes` is their size. If data is null and bytes 0, the elements are zeros.
SemitoneStatus semitone_tensor_create(const void* data, size_t bytes, int32_t dtype,
                                      const int64_t* sizes, size_t dims, SemitoneTensor** tensor);
/// Destroys the at::Tensor. The memory of its elements is shared by all tensors that refer to it.
SemitoneStatus semitone_tensor_destroy(SemitoneTensor* tensor);
SemitoneStatus semitone_tensor_dtype(const SemitoneTensor* tensor, int32_t* dtype);
/// Writes the number of dimensions, and the sizes, of which there is space for `capacity`. Error if
/// there are more; pass a capacity of 0 to ask for the number alone.
SemitoneStatus semitone_tensor_sizes(const SemitoneTensor* tensor, int64_t* sizes, size_t capacity,
                                     size_t* dims);
/// Copies the elements to `data`, row-major, from any device. Error unless `bytes` is their size.
SemitoneStatus semitone_tensor_read(const SemitoneTensor* tensor, void* data, size_t bytes);
SemitoneStatus semitone_tensor_set_requires_grad(SemitoneTensor* tensor, int32_t requires_grad);
/// Returns the gradient, or null if there is none. It is the gradient itself, not a copy.
SemitoneStatus semitone_tensor_grad(const SemitoneTensor* tensor, SemitoneTensor** grad);
/// Replaces the gradient; null drops it. Error unless it is another tensor, of the same sizes,
/// dtype and device.
SemitoneStatus semitone_tensor_set_grad(SemitoneTensor* tensor, const SemitoneTensor* grad);
/// Runs the backward pass of a tensor with one element. After an error, gradients may be changed in
/// part.
SemitoneStatus semitone_tensor_backward(const SemitoneTensor* tensor);
/// Sets whether operators on this thread are recorded for backward. `before` gets the previous
/// value; it may be null.
SemitoneStatus semitone_set_grad_enabled(int32_t enabled, int32_t* before);

/// The kind of an argument of semitone_call().
enum {
  SEMITONE_VALUE_NONE = 0,
  SEMITONE_VALUE_TENSOR = 1,  ///< null: None
  SEMITONE_VALUE_INT = 2,     ///< also a dtype
  SEMITONE_VALUE_DOUBLE = 3,
  SEMITONE_VALUE_BOOL = 4,  ///< in `integer`
  SEMITONE_VALUE_STRING = 5,
  SEMITONE_VALUE_TENSORS = 6,
  SEMITONE_VALUE_INTS = 7,
  SEMITONE_VALUE_DOUBLES = 8
};

/// An argument of semitone_call().
typedef struct SemitoneValue {
  int32_t kind;
  size_t count;  ///< of a list
  union {
    const SemitoneTensor* tensor;
    int64_t integer;
    double real;
    const char* string;
    const SemitoneTensor* const* tensors;
    const int64_t* integers;
    const double* reals;
  } value;
} SemitoneValue;

/// Calls an operator through LibTorch's dispatcher, with autograd and with the thread's regions:
/// "aten::addmm", or with the name of an overload "aten::add.Tensor". Arguments are in the order of
/// the operator's schema, those by keyword included. Missing ones at the end have their defaults.
///
/// `results` gets new tensors. Error if there are more than `capacity`, and for results that are no
/// tensors. An undefined tensor is null. With a capacity of 0 the results are dropped; this also
/// serves operators that write to an argument ("aten::add_.Tensor"). Lists among the results are
/// flattened. If these do not fit, or if a result is no tensor, the operator has run. After an
/// error of the operator itself, arguments that it writes to may be changed in part.
/// @param count  number of results that were written; may be null
SemitoneStatus semitone_call(const char* op, const SemitoneValue* arguments, size_t argument_count,
                             SemitoneTensor** results, size_t capacity, size_t* count);

// Cast policies: amp::CastPolicy.

/// What autocast does with the arguments of an operator: amp::CastAction.
enum {
  SEMITONE_ACTION_NONE = -1,  ///< the operator is not in the policy's table
  SEMITONE_ACTION_LOWER = 0,  ///< cast to the policy's 16-bit dtype
  SEMITONE_ACTION_FP32 = 1,
  SEMITONE_ACTION_PROMOTE = 2,  ///< to fp32 if any argument is fp32, otherwise to 16 bits
  SEMITONE_ACTION_WIDEST = 3,   ///< to the widest dtype of the arguments
  SEMITONE_ACTION_LEAVE = 4,
  SEMITONE_ACTION_BAN = 5  ///< an error for 16-bit arguments
};

/// Creates a policy from a preset: "semitone", "torch", "apex", "paddle", "paddle-o2" or "none".
/// @param dtype  SEMITONE_FLOAT16, SEMITONE_BFLOAT16 or SEMITONE_DEFAULT_DTYPE
SemitoneStatus semitone_policy_create(const char* preset, const char* device, int32_t dtype,
                                      SemitonePolicy** policy);
/// Creates the policy in a file that semitone_policy_save() or C++ wrote.
SemitoneStatus semitone_policy_load(const char* path, const char* device, int32_t dtype,
                                    SemitonePolicy** policy);
SemitoneStatus semitone_policy_destroy(SemitonePolicy* policy);
/// Sets the action of an operator by its ATen name: "conv2d", "conv2d.padding", "mylib::my_op".
SemitoneStatus semitone_policy_set(SemitonePolicy* policy, const char* op, int32_t action);
/// Returns the action of an operator, or SEMITONE_ACTION_NONE. Here a name without an overload means
/// the overload that has no name, which some operators lack: "softmax.int", not "softmax".
SemitoneStatus semitone_policy_find(const SemitonePolicy* policy, const char* op, int32_t* action);
/// Keeps the parameters whose names match a glob in fp32. Names need semitone_policy_bind().
SemitoneStatus semitone_policy_keep_fp32_params(SemitonePolicy* policy, const char* glob);
/// Sets which 16-bit operators are emulated: "automatic", "always" or "never".
SemitoneStatus semitone_policy_set_emulation(SemitonePolicy* policy, const char* emulation);
/// Sets whether operators run in Semitone's own kernels where it has one.
SemitoneStatus semitone_policy_set_fast_kernels(SemitonePolicy* policy, int32_t on);
/// Tells the policy the model's parameters with their names ("encoder.0.weight"). The policy keeps
/// references to them. Error for a name that appears twice, and if a glob matches none. Names null:
/// "0", "1" and so on.
SemitoneStatus semitone_policy_bind(SemitonePolicy* policy, const char* const* names,
                                    const SemitoneTensor* const* parameters, size_t count);
SemitoneStatus semitone_policy_save(const SemitonePolicy* policy, const char* path);
/// Returns what semitone_policy_save() writes, as text: free it with semitone_free().
SemitoneStatus semitone_policy_to_json(const SemitonePolicy* policy, char** json);

// Regions: amp::Autocast.

/// Enters a region: until its end, operators of this thread run in the precision that the policy
/// gives them. The policy may be changed or destroyed afterwards. Regions nest.
SemitoneStatus semitone_region_enter(const SemitonePolicy* policy, SemitoneRegion** region);
/// Enters a region in which nothing is cast on a device, also inside another region.
SemitoneStatus semitone_region_enter_disabled(const char* device, SemitoneRegion** region);
/// Ends a region and destroys the handle. Error, with the region still in force, on another thread
/// than the one that entered it, and while a later region of this interface is in force.
SemitoneStatus semitone_region_exit(SemitoneRegion* region);
/// Returns whether operators on a device are cast on this thread.
SemitoneStatus semitone_region_is_active(const char* device, int32_t* is_active);
/// Empties the cache of weight casts. Needed after a write to a weight inside a region that
/// autograd's version counter does not show (through tensor.data()).
SemitoneStatus semitone_clear_cast_cache(void);

// Loss scaling: amp::GradScaler.

/// Creates a loss scale.
/// @param preset  "semitone" (torch's rule with a lower bound), "torch", "apex", "paddle" or
/// "deepspeed"
/// @param options  changes of the preset, by the names of amp::LossScaleOptions: init_scale,
/// growth_factor, backoff_factor, growth_interval, growth_delay, min_scale, max_scale, hysteresis,
/// overflow_count (0: run_then_restart, 1: run, 2: since_growth), dynamic, max_consecutive_skips,
/// scale_dtype (SEMITONE_FLOAT32 or SEMITONE_FLOAT64)
SemitoneStatus semitone_scaler_create(const char* preset, const SemitoneOption* options,
                                      size_t option_count, SemitoneScaler** scaler);
SemitoneStatus semitone_scaler_destroy(SemitoneScaler* scaler);
/// Changes options during training. The scale and its counters stay.
SemitoneStatus semitone_scaler_set_options(SemitoneScaler* scaler, const SemitoneOption* options,
                                           size_t option_count);
/// Returns loss * scale, in fp32 or wider, recorded by autograd: run backward on it.
SemitoneStatus semitone_scaler_scale(SemitoneScaler* scaler, const SemitoneTensor* loss,
                                     SemitoneTensor** scaled);
/// Divides the gradients of parameters by the scale, in place, and checks them for inf and NaN.
/// Parameters without a gradient are left out. If `found_inf` is 1, skip the optimizer's step; the
/// values stay in the gradients until these are cleared. Clip after this call, and step after that.
///
/// Error if semitone_scaler_scale() was never called, for a parameter that was in a list since the
/// last semitone_scaler_update(), and for an expanded gradient. After any error of the scaler's
/// group the gradients are unscaled: end the training. Several optimizers need one call each;
/// a skip of one does not concern the others. Reads once from the device.
SemitoneStatus semitone_scaler_unscale(SemitoneScaler* scaler,
                                       const SemitoneTensor* const* parameters, size_t count,
                                       int32_t* found_inf);
/// Updates the scale with the results since the last update: once at the end of an iteration. Error
/// if nothing was unscaled. SEMITONE_DIVERGED_ERROR after max_consecutive_skips consecutive skips:
/// the scale is updated, and the scaler stays usable.
SemitoneStatus semitone_scaler_update(SemitoneScaler* scaler);
SemitoneStatus semitone_scaler_get_scale(const SemitoneScaler* scaler, double* scale);
/// Sets the scale, which must be positive and finite, and drops results since the last update.
/// Error before the first semitone_scaler_scale().
SemitoneStatus semitone_scaler_set_scale(SemitoneScaler* scaler, double scale);
/// Returns how many calls of semitone_scaler_unscale() found an inf or NaN.
SemitoneStatus semitone_scaler_skipped_steps(const SemitoneScaler* scaler, int64_t* steps);
/// Adds names of parameters for messages. A parameter that has a name keeps it. Names null: "0",
/// "1" and so on.
SemitoneStatus semitone_scaler_name_parameters(SemitoneScaler* scaler, const char* const* names,
                                               const SemitoneTensor* const* parameters,
                                               size_t count);
/// Lets the ranks of a group agree: if one finds an inf, all skip. Needed if ranks do not share all
/// gradients; after an average over the ranks they agree anyway. Null: no group. The scaler keeps
/// the group alive.
SemitoneStatus semitone_scaler_set_group(SemitoneScaler* scaler, const SemitoneGroup* group);
/// Saves options, scale and counters, to continue bit for bit: `bytes` is freed with
/// semitone_free(). Error between semitone_scaler_unscale() and semitone_scaler_update().
SemitoneStatus semitone_scaler_save(const SemitoneScaler* scaler, char** bytes, size_t* size);
/// Loads what semitone_scaler_save() returned. Damaged bytes, which do not match the CRC-32 at their
/// end, are a SEMITONE_FILE_ERROR, as are values that no scaler has. As every archive of LibTorch,
/// the bytes can contain code that runs while they are loaded: take them only from a source that you
/// trust as you trust a program (docs/security.md).
SemitoneStatus semitone_scaler_load(SemitoneScaler* scaler, const void* bytes, size_t size);

// Master weights: amp::MasterWeights.

/// Creates fp32 copies ("masters") of the 16-bit parameters in a list. The optimizer updates the
/// masters, and the model gets the rounded values. The object keeps references to the parameters.
SemitoneStatus semitone_masters_create(const SemitoneTensor* const* parameters, size_t count,
                                       SemitoneMasters** masters);
/// Drops the masters with their gradients. The parameters keep their values, and gradients that
/// semitone_masters_take_gradients() has not moved.
SemitoneStatus semitone_masters_destroy(SemitoneMasters* masters);
/// Writes the tensors that the optimizer is to update, in the order of the parameters: the master
/// of a 16-bit parameter that required a gradient in semitone_masters_create(), and every other
/// parameter itself. They are new pointers to the same tensors, with the same gradients. Error
/// unless `count` is the number of parameters.
SemitoneStatus semitone_masters_list(const SemitoneMasters* masters, SemitoneTensor** tensors,
                                     size_t count);
/// Moves gradients from the model to the masters, as they are: adds each to its master's, in fp32,
/// and drops it in the model. With a loss scale, call semitone_scaler_unscale() with the tensors of
/// semitone_masters_list() afterwards. Error if a gradient is still this rank's own: of a backward
/// pass between semitone_ddp_begin_no_sync() and semitone_ddp_end_no_sync(), without one after it.
SemitoneStatus semitone_masters_take_gradients(SemitoneMasters* masters);
/// Drops the gradients of the tensors of semitone_masters_list(): after a step, and after a skipped
/// one.
SemitoneStatus semitone_masters_clear_gradients(SemitoneMasters* masters);
/// Rounds the masters into their parameters. Call it after the optimizer's step.
SemitoneStatus semitone_masters_write_model(SemitoneMasters* masters);
/// Copies parameters that were written to from outside (loaded, clamped) to their masters.
/// Unchanged elements keep their exact value. Write with operators (`aten::copy_`): a write through
/// a pointer to the values, which autograd's version counter does not show, is noticed on a CPU
/// only, and only if it changes one of 16 elements, spread evenly.
///
/// Error if a 16-bit parameter that was frozen in semitone_masters_create() requires a gradient
/// now: it needs a master, which your optimizer does not have. Destroy the masters and create them
/// anew, or unfreeze parameters before semitone_masters_create(). Also an error, with the
/// parameters before it copied, for a parameter whose shape has changed, and for one that was
/// changed in place between the optimizer's step and semitone_masters_write_model().
SemitoneStatus semitone_masters_sync(SemitoneMasters* masters);
/// Saves the masters bit for bit, by their places in the list: `bytes` is freed with
/// semitone_free().
SemitoneStatus semitone_masters_save(const SemitoneMasters* masters, char** bytes, size_t* size);
/// Loads what semitone_masters_save() returned, and rounds the masters into their parameters. Error
/// for the masters of another list, and for an unfrozen parameter as in semitone_masters_sync().
/// Damaged bytes are a SEMITONE_FILE_ERROR. They can contain code: load only what you trust as you
/// trust a program, as in semitone_scaler_load().
SemitoneStatus semitone_masters_load(SemitoneMasters* masters, const void* bytes, size_t size);

// Several processes: comm::Group and parallel::DistributedDataParallel.

/// Returns this process's place, as its launcher's environment variables say (torchrun, `semitone
/// launch`, MPI, Slurm: docs/environment.md). Without a launcher it is rank 0 of 1. `local_rank` is
/// -1 if the environment does not say it. Each pointer may be null. MASTER_ADDR is not needed.
SemitoneStatus semitone_rank_environment(int32_t* rank, int32_t* world_size, int32_t* local_rank);

/// How ranks' values are combined: comm::ReduceOp.
enum {
  SEMITONE_REDUCE_SUM = 0,
  SEMITONE_REDUCE_MEAN = 1,
  SEMITONE_REDUCE_MIN = 2,
  SEMITONE_REDUCE_MAX = 3,
  SEMITONE_REDUCE_PRODUCT = 4
};

/// Performs the rendezvous and creates the group of all processes: comm::init. Blocks until all
/// have arrived. With several processes, it makes the process ignore SIGPIPE, unless the program
/// has a handler for it. A lost rank is therefore an error in the others, and no signal ends them.
/// @param url  "env://", "tcp://HOST:PORT?rank=R&world_size=N" or
/// "file:///PATH?rank=R&world_size=N"; null: "env://"
/// @param backend  "gloo", "nccl" or "auto"; null: "auto"
/// @param timeout  of a collective and of the rendezvous, in seconds; 0: 30 minutes
SemitoneStatus semitone_group_create(const char* url, const char* backend, double timeout,
                                     SemitoneGroup** group);
/// Scalers and ddps that hold the group keep it. Destroy all of them before the process ends:
/// otherwise the other ranks take this one for lost, and their collectives fail.
SemitoneStatus semitone_group_destroy(SemitoneGroup* group);
SemitoneStatus semitone_group_rank(const SemitoneGroup* group, int32_t* rank);
SemitoneStatus semitone_group_size(const SemitoneGroup* group, int32_t* size);
/// Combines tensors over the ranks, in place, in one message for each dtype. Every rank passes
/// tensors of the same dtypes and shapes, in the same order, as many as the others: zeros for a
/// gradient that a rank does not have. After an error they may be changed in part. Autograd does not
/// record it.
SemitoneStatus semitone_group_all_reduce(const SemitoneGroup* group, SemitoneTensor* const* tensors,
                                         size_t count, int32_t op);
/// Copies the tensors of a rank to all ranks. After an error they may be changed in part.
SemitoneStatus semitone_group_broadcast(const SemitoneGroup* group, SemitoneTensor* const* tensors,
                                        size_t count, int32_t root);
/// Returns when all ranks have called it.
SemitoneStatus semitone_group_barrier(const SemitoneGroup* group);

/// Creates a DistributedDataParallel for the parameters and buffers of a model: makes them equal to
/// rank 0's, and lets backward average the gradients over the ranks. Collective; each rank passes
/// the same names. The checks, the options and the errors are those of C++
/// (parallel/distributed_data_parallel.h), but sparse gradients are not supported. A tensor that is
/// in the lists twice (a tied weight) counts once, under its first name. After an error the tensors
/// may be rank 0's already. Create masters and optimizers after it. The object keeps references to
/// the tensors and to the group.
/// @param names  of the parameters, for messages; null: their numbers
/// @param buffers  set to rank 0's before each forward; may be empty
/// @param options  by the names of DistributedDataParallelOptions: bucket_cap_mb, first_bucket_mb,
/// broadcast_buffers, find_unused_parameters, static_graph, gradient_as_bucket_view,
/// delay_allreduce, gradient_predivide_factor, allreduce_always_fp32, compress (a dtype)
SemitoneStatus semitone_ddp_create(const SemitoneGroup* group, const char* const* names,
                                   const SemitoneTensor* const* parameters, size_t count,
                                   const SemitoneTensor* const* buffers, size_t buffer_count,
                                   const SemitoneOption* options, size_t option_count,
                                   SemitoneDdp** ddp);
SemitoneStatus semitone_ddp_destroy(SemitoneDdp* ddp);
/// Call it before each forward of the model whose gradients are to be averaged, also when a step is
/// repeated after an error. After an error of this function, buffers may be rank 0's already.
SemitoneStatus semitone_ddp_begin_forward(SemitoneDdp* ddp);
/// Call it after the forward, with the tensors that it returned. Each at::Tensor may be replaced by
/// one that leads autograd through the reduction, so compute the loss from these afterwards. Error
/// unless semitone_ddp_begin_forward() was called since the last call. The list may be empty, except
/// with find_unused_parameters and without static_graph: the search starts at these tensors, so an
/// empty list is an error. It is none with grad mode off, nor between semitone_ddp_begin_no_sync()
/// and semitone_ddp_end_no_sync(). With find_unused_parameters or static_graph it is also an error
/// to pass a parameter or another leaf that requires a gradient: pass an alias of it.
SemitoneStatus semitone_ddp_end_forward(SemitoneDdp* ddp, SemitoneTensor* const* outputs,
                                        size_t count);
/// Between these two calls, backward passes add to each rank's own gradients, without
/// communication.
SemitoneStatus semitone_ddp_begin_no_sync(SemitoneDdp* ddp);
SemitoneStatus semitone_ddp_end_no_sync(SemitoneDdp* ddp);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

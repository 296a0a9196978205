/* The C interface from C99: every kind of wrong argument, and a step of a training. */
#include <semitone/c/semitone.h>

#include <stdio.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      printf("  the last error is: %s\n", semitone_last_error());     \
      ++failures;                                                     \
    }                                                                 \
  } while (0)

/* The call fails with this status, and the message contains the text. */
#define CHECK_FAILS(call, expected, text)                                                 \
  do {                                                                                    \
    const SemitoneStatus found = (call);                                                  \
    if (found != (expected) || strstr(semitone_last_error(), (text)) == NULL) {           \
      printf("%s:%d: expected status %d and '%s', got %d and '%s'\n", __FILE__, __LINE__, \
             (int)(expected), (text), (int)found, semitone_last_error());                 \
      ++failures;                                                                         \
    }                                                                                     \
  } while (0)

static SemitoneTensor* vector_of(float first, float second) {
  SemitoneTensor* tensor = NULL;
  const float data[2] = {first, second};
  const int64_t size = 2;
  CHECK(semitone_tensor_create(data, sizeof data, SEMITONE_FLOAT32, &size, 1, &tensor) ==
        SEMITONE_OK);
  return tensor;
}

static void test_versions(void) {
  CHECK(strlen(semitone_version()) > 0);
  CHECK(strlen(semitone_libtorch_version()) > 0);
  CHECK(strcmp(semitone_last_error(), "") == 0); /* nothing has failed yet */
}

static void test_null_and_destroyed_handles(void) {
  SemitoneScaler* scaler = NULL;
  SemitonePolicy* policy = NULL;
  double scale = 0;
  int on_the_stack = 0;
  CHECK(semitone_scaler_create("semitone", NULL, 0, &scaler) == SEMITONE_OK);
  CHECK(semitone_policy_create("semitone", "cpu", SEMITONE_FLOAT16, &policy) == SEMITONE_OK);
  CHECK_FAILS(semitone_scaler_get_scale(NULL, &scale), SEMITONE_ERROR,
              "[semitone_scaler_get_scale] expected a SemitoneScaler, got a null pointer");
  CHECK_FAILS(semitone_scaler_get_scale(scaler, NULL), SEMITONE_ERROR,
              "expected a pointer for the scale, got a null pointer");
  CHECK_FAILS(semitone_scaler_get_scale((SemitoneScaler*)(void*)&on_the_stack, &scale),
              SEMITONE_ERROR, "got a pointer that is no handle");
  CHECK_FAILS(semitone_scaler_get_scale((SemitoneScaler*)(void*)policy, &scale), SEMITONE_ERROR,
              "expected a SemitoneScaler, got a SemitonePolicy");
  CHECK(scale == 0);
  CHECK(semitone_scaler_get_scale(scaler, &scale) == SEMITONE_OK);
  CHECK(scale == 65536);
  CHECK(semitone_scaler_destroy(scaler) == SEMITONE_OK);
  CHECK_FAILS(semitone_scaler_destroy(scaler), SEMITONE_ERROR, "a handle that was destroyed");
  CHECK_FAILS(semitone_scaler_get_scale(scaler, &scale), SEMITONE_ERROR,
              "a handle that was destroyed");
  CHECK(semitone_policy_destroy(policy) == SEMITONE_OK);
  CHECK(semitone_policy_destroy(NULL) == SEMITONE_OK);
  CHECK(semitone_scaler_destroy(NULL) == SEMITONE_OK);
  CHECK(semitone_masters_destroy(NULL) == SEMITONE_OK);
  CHECK(semitone_group_destroy(NULL) == SEMITONE_OK);
  CHECK(semitone_ddp_destroy(NULL) == SEMITONE_OK);
  CHECK(semitone_tensor_destroy(NULL) == SEMITONE_OK);
  CHECK_FAILS(semitone_region_exit(NULL), SEMITONE_ERROR, "a null pointer");
  CHECK_FAILS(semitone_scaler_create("semitone", NULL, 0, NULL), SEMITONE_ERROR, "a null pointer");
  semitone_free(NULL);
}

static void test_every_function_refuses_null(void) {
  CHECK_FAILS(semitone_tensor_create(NULL, 0, SEMITONE_FLOAT32, NULL, 1, NULL), SEMITONE_ERROR,
              "null");
  CHECK_FAILS(semitone_tensor_dtype(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_sizes(NULL, NULL, 0, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_read(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_set_requires_grad(NULL, 1), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_grad(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_set_grad(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_tensor_backward(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_call(NULL, NULL, 0, NULL, 0, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_call("aten::t", NULL, 1, NULL, 0, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_call("aten::t", NULL, 0, NULL, 1, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_create(NULL, "cpu", -1, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_load(NULL, "cpu", -1, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_set(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_find(NULL, NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_keep_fp32_params(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_set_emulation(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_set_fast_kernels(NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_bind(NULL, NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_save(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_policy_to_json(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_region_enter(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_region_enter_disabled(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_region_is_active(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_set_options(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_scale(NULL, NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_unscale(NULL, NULL, 0, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_update(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_set_scale(NULL, 1), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_skipped_steps(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_name_parameters(NULL, NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_set_group(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_save(NULL, NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_scaler_load(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_create(NULL, 1, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_list(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_take_gradients(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_clear_gradients(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_write_model(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_sync(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_save(NULL, NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_masters_load(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_create(NULL, NULL, 0, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_rank(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_size(NULL, NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_all_reduce(NULL, NULL, 0, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_broadcast(NULL, NULL, 0, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_group_barrier(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_ddp_create(NULL, NULL, NULL, 0, NULL, 0, NULL, 0, NULL), SEMITONE_ERROR,
              "null");
  CHECK_FAILS(semitone_ddp_begin_forward(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_ddp_end_forward(NULL, NULL, 0), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_ddp_begin_no_sync(NULL), SEMITONE_ERROR, "null");
  CHECK_FAILS(semitone_ddp_end_no_sync(NULL), SEMITONE_ERROR, "null");
}

static void test_tensors(void) {
  SemitoneTensor* tensor = vector_of(1, 2);
  const int64_t negative = -1;
  const int64_t three = 3;
  const int64_t huge[2] = {(int64_t)1 << 62, 4};
  float data[2] = {0, 0};
  int64_t size = 0;
  size_t dims = 0;
  int32_t dtype = 0;
  SemitoneTensor* result = NULL;
  CHECK_FAILS(semitone_tensor_create(NULL, 0, 99, &size, 1, &result), SEMITONE_ERROR,
              "expected a dtype, SEMITONE_FLOAT32 …, got the number 99");
  CHECK_FAILS(semitone_tensor_create(NULL, 0, SEMITONE_FLOAT32, &negative, 1, &result),
              SEMITONE_ERROR, "expected sizes of at least 0, got -1");
  CHECK_FAILS(semitone_tensor_create(NULL, 0, SEMITONE_FLOAT32, NULL, 1, &result), SEMITONE_ERROR,
              "expected a list of sizes, got a null pointer");
  CHECK_FAILS(semitone_tensor_create(data, sizeof data, SEMITONE_FLOAT32, &three, 1, &result),
              SEMITONE_ERROR, "expected 12 bytes for 3 elements of float32, got 8");
  CHECK_FAILS(semitone_tensor_create(NULL, 12, SEMITONE_FLOAT32, &three, 1, &result),
              SEMITONE_ERROR, "expected a pointer to the elements, got a null pointer");
  CHECK_FAILS(semitone_tensor_create(NULL, 0, SEMITONE_FLOAT32, huge, 2, &result), SEMITONE_ERROR,
              "expected fewer than 2^64 bytes, got the sizes [4611686018427387904, 4]");
  CHECK(result == NULL);
  CHECK(semitone_tensor_create(NULL, 0, SEMITONE_FLOAT32, &three, 1, &result) == SEMITONE_OK);
  CHECK(semitone_tensor_destroy(result) == SEMITONE_OK);
  CHECK(semitone_tensor_dtype(tensor, &dtype) == SEMITONE_OK);
  CHECK(dtype == SEMITONE_FLOAT32);
  CHECK(semitone_tensor_sizes(tensor, &size, 1, &dims) == SEMITONE_OK);
  CHECK(dims == 1 && size == 2);
  CHECK_FAILS(semitone_tensor_read(tensor, data, 4), SEMITONE_ERROR,
              "expected 8 bytes for 2 elements of float32, got 4");
  CHECK(semitone_tensor_read(tensor, data, 8) == SEMITONE_OK);
  CHECK(data[0] == 1 && data[1] == 2);
  CHECK_FAILS(semitone_tensor_backward(tensor), SEMITONE_LIBTORCH_ERROR, "grad");
  CHECK(semitone_tensor_destroy(tensor) == SEMITONE_OK);
}

static void test_lists(void) {
  SemitoneScaler* scaler = NULL;
  SemitoneTensor* tensors[2] = {NULL, NULL};
  SemitoneTensor* scaled = NULL;
  int32_t found_inf = 0;
  tensors[0] = vector_of(1, 2);
  CHECK(semitone_scaler_create("torch", NULL, 0, &scaler) == SEMITONE_OK);
  CHECK(semitone_scaler_scale(scaler, tensors[0], &scaled) == SEMITONE_OK);
  CHECK_FAILS(semitone_scaler_unscale(scaler, (const SemitoneTensor* const*)tensors, 2, &found_inf),
              SEMITONE_ERROR,
              "expected a tensor in each place of a list, got null in place 1 of 2");
  CHECK_FAILS(semitone_scaler_unscale(scaler, NULL, 2, &found_inf), SEMITONE_ERROR,
              "expected a list of tensors, got a null pointer");
  CHECK(semitone_tensor_destroy(tensors[0]) == SEMITONE_OK);
  CHECK(semitone_tensor_destroy(scaled) == SEMITONE_OK);
  CHECK(semitone_scaler_destroy(scaler) == SEMITONE_OK);
}

static void test_calls_with_values_of_no_kind(void) {
  SemitoneValue value;
  memset(&value, 0, sizeof value);
  value.kind = 77;
  CHECK_FAILS(semitone_call("aten::t", &value, 1, NULL, 0, NULL), SEMITONE_ERROR,
              "expected a kind of value, SEMITONE_VALUE_TENSOR …, got the number 77");
  value.count = 3; /* the kind is wrong, not the list without a pointer */
  CHECK_FAILS(semitone_call("aten::t", &value, 1, NULL, 0, NULL), SEMITONE_ERROR,
              "expected a kind of value, SEMITONE_VALUE_TENSOR …, got the number 77");
  value.kind = SEMITONE_VALUE_INTS;
  CHECK_FAILS(semitone_call("aten::t", &value, 1, NULL, 0, NULL), SEMITONE_ERROR,
              "expected a list of values, got a null pointer");
}

/* The gradient of sum(w * x) is x, in a region, scaled and unscaled. */
static void test_step(void) {
  SemitonePolicy* policy = NULL;
  SemitoneRegion* region = NULL;
  SemitoneScaler* scaler = NULL;
  SemitoneTensor* weight = vector_of(1, 2);
  SemitoneTensor* input = vector_of(3, 4);
  SemitoneTensor* product = NULL;
  SemitoneTensor* scaled = NULL;
  SemitoneTensor* grad = NULL;
  SemitoneValue arguments[2];
  size_t count = 0;
  int32_t found_inf = 1;
  int32_t dtype = 0;
  int32_t before = 0;
  float data[2] = {0, 0};
  CHECK(semitone_tensor_set_requires_grad(weight, 1) == SEMITONE_OK);
  CHECK(semitone_policy_create("semitone", "cpu", SEMITONE_FLOAT16, &policy) == SEMITONE_OK);
  CHECK(semitone_scaler_create("semitone", NULL, 0, &scaler) == SEMITONE_OK);
  CHECK(semitone_region_enter(policy, &region) == SEMITONE_OK);
  memset(arguments, 0, sizeof arguments);
  arguments[0].kind = SEMITONE_VALUE_TENSOR;
  arguments[0].value.tensor = weight;
  arguments[1].kind = SEMITONE_VALUE_TENSOR;
  arguments[1].value.tensor = input;
  CHECK(semitone_call("aten::matmul", arguments, 2, &product, 1, &count) == SEMITONE_OK);
  CHECK(count == 1);
  CHECK(semitone_clear_cast_cache() == SEMITONE_OK);
  CHECK(semitone_region_exit(region) == SEMITONE_OK);
  CHECK(semitone_tensor_dtype(product, &dtype) == SEMITONE_OK);
  CHECK(dtype == SEMITONE_FLOAT16);
  CHECK(semitone_scaler_scale(scaler, product, &scaled) == SEMITONE_OK);
  CHECK(semitone_tensor_backward(scaled) == SEMITONE_OK);
  CHECK(semitone_scaler_unscale(scaler, (const SemitoneTensor* const*)&weight, 1, &found_inf) ==
        SEMITONE_OK);
  CHECK(found_inf == 1); /* 65536 * 3 is beyond fp16's range */
  CHECK(semitone_tensor_set_grad(weight, input) == SEMITONE_OK);
  CHECK(semitone_tensor_grad(weight, &grad) == SEMITONE_OK);
  CHECK(semitone_tensor_read(grad, data, sizeof data) == SEMITONE_OK);
  CHECK(data[0] == 3 && data[1] == 4);
  CHECK(semitone_scaler_update(scaler) == SEMITONE_OK);
  CHECK(semitone_set_grad_enabled(0, &before) == SEMITONE_OK);
  CHECK(before == 1);
  CHECK(semitone_set_grad_enabled(before, NULL) == SEMITONE_OK);
  semitone_tensor_destroy(weight);
  semitone_tensor_destroy(input);
  semitone_tensor_destroy(product);
  semitone_tensor_destroy(scaled);
  semitone_tensor_destroy(grad);
  CHECK(semitone_policy_destroy(policy) == SEMITONE_OK);
  CHECK(semitone_scaler_destroy(scaler) == SEMITONE_OK);
}

int main(void) {
  test_versions();
  test_null_and_destroyed_handles();
  test_every_function_refuses_null();
  test_tensors();
  test_lists();
  test_calls_with_values_of_no_kind();
  test_step();
  printf(failures == 0 ? "passed\n" : "failed\n");
  return failures == 0 ? 0 : 1;
}

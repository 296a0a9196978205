/* A loss scale: the smallest C program that uses an installed Semitone. */
#include <semitone/c/semitone.h>

#include <stdio.h>

int main(void) {
  SemitoneScaler* scaler = NULL;
  const SemitoneOption options[] = {{"init_scale", 1024}};
  double scale = 0;
  if (semitone_scaler_create("torch", options, 1, &scaler) != SEMITONE_OK ||
      semitone_scaler_get_scale(scaler, &scale) != SEMITONE_OK) {
    fprintf(stderr, "%s\n", semitone_last_error());
    return 1;
  }
  semitone_scaler_destroy(scaler);
  printf("Semitone %s, LibTorch %s: the scale is %g\n", semitone_version(),
         semitone_libtorch_version(), scale);
  return scale == 1024 ? 0 : 1;
}

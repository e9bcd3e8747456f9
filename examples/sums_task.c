/* Sums of two numbers, a task in C. Build: cc -shared -fPIC -O2 -I clients/c -o libsums.so examples/sums_task.c
 * Run file: task: {adapter: library, options: {library: libsums.so, settings: {largest: 99}}} */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "echoline_task.h"

enum { HELD_OUT = 64, SHUFFLE_PRIME = 7919 };

typedef struct {
  uint64_t largest;
  char prompt[64], answer[32];
  echoline_component digits;
} sums;

static echoline_text text(const char* s) {
  echoline_text t = {s, strlen(s)};
  return t;
}

static int open_task(echoline_text settings, uint64_t seed, void** task, char* why) {
  char json[256] = "";
  const char* setting;
  sums* s = calloc(1, sizeof *s);
  (void)seed;
  if (s == NULL || settings.size >= sizeof json) {
    free(s);
    return snprintf(why, ECHOLINE_WHY_BYTES, "expected settings of less than %zu bytes", sizeof json);
  }
  memcpy(json, settings.data, settings.size);
  setting = strstr(json, "\"largest\":"); /* a real task would use a JSON library */
  s->largest = setting ? strtoull(setting + strlen("\"largest\":"), NULL, 10) : 99;
  if (s->largest < 9 || s->largest > 999) {
    free(s);
    return snprintf(why, ECHOLINE_WHY_BYTES, "expected a setting 'largest' from 9 to 999");
  }
  *task = s;
  return 0;
}

static void close_task(void* task) { free(task); }

static uint64_t problem_count(void* task, int evaluation) {
  const uint64_t numbers = ((sums*)task)->largest + 1;
  return evaluation ? HELD_OUT : numbers * numbers - HELD_OUT;
}

static int problem(void* task, int evaluation, uint64_t row, echoline_problem* out, char* why) {
  sums* s = task;
  const uint64_t numbers = s->largest + 1, pairs = numbers * numbers;
  /* SHUFFLE_PRIME is above `numbers`, so each row is another pair. The held-out problems are the first rows. */
  const uint64_t pair = (evaluation ? row : row + HELD_OUT) * SHUFFLE_PRIME % pairs;
  const unsigned long long a = pair / numbers, b = pair % numbers;
  (void)why;
  snprintf(s->prompt, sizeof s->prompt, "%llu+%llu=", a, b);
  snprintf(s->answer, sizeof s->answer, "%llu", a + b);
  out->prompt = text(s->prompt);
  out->reference = out->demonstration = text(s->answer);
  return 0;
}

static int score(void* task, const echoline_problem* problem, echoline_text response, echoline_score* out, char* why) {
  sums* s = task;
  (void)why;
  out->reward =
      response.size == problem->reference.size && memcmp(response.data, problem->reference.data, response.size) == 0;
  s->digits.name = text("digits");
  s->digits.value = (double)response.size;
  out->components = &s->digits;
  out->component_count = 1;
  return 0;
}

const echoline_task_table* echoline_task(uint32_t abi) {
  static const echoline_task_table table = {.abi = ECHOLINE_TASK_ABI,
                                            .size = sizeof table,
                                            .name = "sums",
                                            .deterministic = 1,
                                            .open = open_task,
                                            .close = close_task,
                                            .problem_count = problem_count,
                                            .problem = problem,
                                            .score = score};
  return abi < ECHOLINE_TASK_ABI ? NULL : &table;
}

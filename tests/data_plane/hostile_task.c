/* A task that does wrong what its settings name: before it is a task, or for the response that is named so. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "echoline_task.h"

static echoline_task_table table;
static echoline_component parts[100];

static echoline_text text(const char *s) {
  echoline_text t = {s, strlen(s)};
  return t;
}

static int is(echoline_text t, const char *s) { return t.size == strlen(s) && memcmp(t.data, s, t.size) == 0; }

static int open_task(echoline_text settings, uint64_t seed, void **task, char *why) {
  (void)seed;
  (void)task;
  if (settings.size > 2) {
    memset(why, 'x', ECHOLINE_WHY_BYTES); /* without an end */
    return 1;
  }
  return 0;
}
static void close_task(void *task) { (void)task; }
static uint64_t problem_count(void *task, int evaluation) {
  (void)task;
  return evaluation ? 0 : 1;
}
static int problem(void *task, int evaluation, uint64_t row, echoline_problem *out, char *why) {
  (void)task, (void)evaluation, (void)row, (void)why;
  out->prompt = text("?");
  return 0;
}

static int begin(void *task, const echoline_problem *p, uint64_t seed, void **episode, char *why) {
  (void)task, (void)p, (void)seed, (void)why;
  *episode = malloc(1);
  return 0;
}
static void destroy(void *episode) { free(episode); }
static int cut(void *episode, echoline_score *out, char *why) {
  (void)episode, (void)why;
  out->reward = -2;
  return 0;
}

static int step(void *episode, echoline_text response, echoline_score *out, char *why) {
  (void)episode;
  out->reward = 1;
  if (is(response, "nan")) out->reward = out->reward * 0.0 / 0.0;
  if (is(response, "verdict")) out->verdict = 9;
  if (is(response, "null")) out->more = 1, out->observation.size = 5;
  if (is(response, "endless")) out->more = 1, out->observation.data = "x", out->observation.size = (size_t)-1;
  if (is(response, "bytes")) out->more = 1, out->observation = text("\xff\xfe");
  if (is(response, "components")) out->component_count = 3;
  if (is(response, "many")) out->components = parts, out->component_count = 100;
  if (is(response, "nameless")) out->components = parts, out->component_count = 1;
  if (is(response, "more")) out->more = 1, out->observation = text("go on");
  if (is(response, "silent")) return 3;
  if (is(response, "words")) return snprintf(why, ECHOLINE_WHY_BYTES, "no such \xff move");
  if (is(response, "crash")) raise(SIGSEGV);
  if (is(response, "exit")) exit(0);
  if (is(response, "hang")) pause();
  if (is(response, "print")) {
    puts("{\"id\":1}");
    fflush(stdout);
  }
  return 0;
}

const echoline_task_table *echoline_task(uint32_t abi) {
  (void)abi;
  table.abi = ECHOLINE_TASK_ABI;
  table.size = sizeof table;
  table.name = "hostile";
  table.open = open_task;
  table.close = close_task;
  table.problem_count = problem_count;
  table.problem = problem;
  table.begin = begin;
  table.step = step;
  table.cut = cut;
  table.destroy = destroy;
#ifdef DEED
  DEED;
#endif
  return &table;
}

/* A few helper threads that run numbered tasks beside the caller.
 *
 * Tasks are claimed one by one, so a thread that the machine takes away holds up one task and not its share of the work;
 * threads that wait look out for a few microseconds and then sleep. Which thread runs a task never changes a result.
 */
#ifndef DIPTYCH_THREADS_H
#define DIPTYCH_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#define MAX_THREADS 64
#define LOOK_OUT 200 /* rounds of pause before a thread sleeps, some microseconds; see docs/decisions/native-threads.md */

typedef void (*task_function)(const void *context, long task, int thread); /* thread: 0 .. num_threads - 1 */

static struct {
    _Atomic uint64_t state; /* job number << 32 | next task */
    _Atomic(task_function) run;
    _Atomic(const void *) context;
    _Atomic long num_tasks, num_done;
    _Atomic int num_wanted, num_asleep, caller_asleep;
    int num_helpers;
    pid_t owner;
    pthread_mutex_t one_job, sleep;
    pthread_cond_t wake, done;
} crew = {
    .one_job = PTHREAD_MUTEX_INITIALIZER,
    .sleep = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run tasks of job `number` until none is left to claim. */
static void take_part(uint32_t number, int thread) {
    uint64_t state = atomic_load(&crew.state);
    while ((uint32_t)(state >> 32) == number) {
        task_function run = atomic_load(&crew.run);
        const void *context = atomic_load(&crew.context);
        long num_tasks = atomic_load(&crew.num_tasks);
        if ((long)(uint32_t)state >= num_tasks) return;
        /* Succeeds only if this is still the same job: then what was read above belongs to it. */
        if (!atomic_compare_exchange_weak(&crew.state, &state, state + 1)) continue;
        run(context, (long)(uint32_t)state, thread);
        /* The caller says that it sleeps before it looks at num_done: one of the two sees the other. */
        if (atomic_fetch_add(&crew.num_done, 1) + 1 == num_tasks && atomic_load(&crew.caller_asleep)) {
            pthread_mutex_lock(&crew.sleep);
            pthread_cond_signal(&crew.done);
            pthread_mutex_unlock(&crew.sleep);
        }
        state = atomic_load(&crew.state);
    }
}

static void *helper(void *argument) {
    int index = (int)(intptr_t)argument; /* 1, 2, ... */
    uint32_t seen = 0;
    for (;;) {
        uint32_t number = seen;
        for (int i = 0; i < LOOK_OUT && number == seen; i++) {
            pause_briefly();
            number = (uint32_t)(atomic_load(&crew.state) >> 32);
        }
        if (number == seen) {
            pthread_mutex_lock(&crew.sleep);
            atomic_fetch_add(&crew.num_asleep, 1);
            while ((number = (uint32_t)(atomic_load(&crew.state) >> 32)) == seen)
                pthread_cond_wait(&crew.wake, &crew.sleep);
            atomic_fetch_sub(&crew.num_asleep, 1);
            pthread_mutex_unlock(&crew.sleep);
        }
        seen = number;
        if (index < atomic_load(&crew.num_wanted)) take_part(number, index);
    }
    return NULL;
}

static void hire(int num_helpers) {
    if (crew.owner != getpid()) { /* a fork has the memory but not the threads */
        crew.owner = getpid();
        crew.num_helpers = 0;
        atomic_store(&crew.num_asleep, 0);
        pthread_mutex_init(&crew.sleep, NULL);
        pthread_cond_init(&crew.wake, NULL);
        pthread_cond_init(&crew.done, NULL);
    }
    while (crew.num_helpers < num_helpers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)(crew.num_helpers + 1)) != 0) return;
        pthread_detach(thread);
        crew.num_helpers++;
    }
}

/* Run tasks 0 .. num_tasks - 1 on the caller and at most num_threads - 1 helpers; returns when all are done. A second caller
 * at the same time works alone. */
static void run_tasks(task_function run, const void *context, long num_tasks, int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads < 2 || num_tasks < 2 || pthread_mutex_trylock(&crew.one_job) != 0) {
        for (long task = 0; task < num_tasks; task++) run(context, task, 0);
        return;
    }
    hire(num_threads - 1);
    uint32_t number = (uint32_t)(atomic_load(&crew.state) >> 32) + 2;
    /* A number of its own, with no task to claim, while the fields change: a late helper's claim then fails. */
    atomic_store(&crew.state, (uint64_t)(number - 1) << 32 | UINT32_MAX);
    atomic_store(&crew.num_done, 0);
    atomic_store(&crew.run, run);
    atomic_store(&crew.context, context);
    atomic_store(&crew.num_wanted, num_threads);
    atomic_store(&crew.num_tasks, num_tasks);
    atomic_store(&crew.state, (uint64_t)number << 32);
    if (atomic_load(&crew.num_asleep) > 0) {
        pthread_mutex_lock(&crew.sleep);
        pthread_cond_broadcast(&crew.wake);
        pthread_mutex_unlock(&crew.sleep);
    }
    take_part(number, 0);
    for (int i = 0; i < LOOK_OUT && atomic_load(&crew.num_done) < num_tasks; i++) pause_briefly();
    if (atomic_load(&crew.num_done) < num_tasks) {
        pthread_mutex_lock(&crew.sleep);
        atomic_store(&crew.caller_asleep, 1);
        while (atomic_load(&crew.num_done) < num_tasks) pthread_cond_wait(&crew.done, &crew.sleep);
        atomic_store(&crew.caller_asleep, 0);
        pthread_mutex_unlock(&crew.sleep);
    }
    pthread_mutex_unlock(&crew.one_job);
}

#endif

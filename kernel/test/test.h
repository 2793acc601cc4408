/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Two endpoints that are each other's peers, and the functions that the test files share. */
#ifndef IWARP_ENGINE_TEST_H
#define IWARP_ENGINE_TEST_H

#include <linux/net.h>
#include <linux/printk.h>
#include <linux/spinlock.h>
#include <linux/time64.h>
#include <linux/types.h>
#include <linux/wait.h>

#include "runtime.h"

#define BUFFER 65536
#define PD 7
/* Time at which the streams start. Tests without a network choose all later times themselves. */
#define START (5 * NSEC_PER_SEC)
#define ALL_RIGHTS (RK_LOCAL_WRITE | RK_REMOTE_WRITE | RK_REMOTE_READ)
/* Time limit for a test that hangs; much more than a slow machine needs. */
#define PATIENCE (120 * HZ)

/* A device with one queue pair, and a buffer registered with all rights. */
struct endpoint {
	const char *name;
	struct rk_device *device;
	struct rk_area *area;
	struct rk_qp *qp;
	/* Guards the queue pair, and the counters and completions below. */
	spinlock_t lock;
	u8 *buffer;
	u32 stag;

	/* Numbers of completions, and the last completion of each queue. */
	u64 sends;
	u64 receives;
	u64 failures;
	u64 in_softirq;
	struct rk_completion last_send;
	struct rk_completion last_receive;
	wait_queue_head_t completed;

	/* Only for tests over TCP; see stream.c. */
	struct socket *socket;
	struct task_struct *sender;
	wait_queue_head_t work;
	bool kicked;
	bool held;
	bool eof;
	bool gone;
	int error;
	void (*data_ready)(struct sock *sk);
	void (*write_space)(struct sock *sk);
	void (*state_change)(struct sock *sk);
};

struct pair {
	struct endpoint a;		/* the initiator */
	struct endpoint b;
};

struct test {
	const char *name;
	int (*run)(struct pair *pair);
	bool crc;
	bool markers;
	bool tcp;
	/* These configure both endpoints, see engine.h. */
	u32 most_completions;
	u32 hold_ms;
	u32 first_fpdu_ms;
};

/* Ends the test unless the condition holds. */
#define EXPECT(condition)							\
	do {									\
		if (!(condition)) {						\
			pr_err("%s:%d: expected: %s\n", __func__, __LINE__,	\
			       #condition);					\
			return -EIO;						\
		}								\
	} while (0)

/* pair.c */
int pair_create(struct pair *pair, const struct test *test);
void pair_free(struct pair *pair);
void pattern(u8 *at, size_t len, u32 seed);
int post(struct endpoint *ep, u32 op, u64 wr_id, const struct endpoint *peer);
int post_range(struct endpoint *ep, u32 op, u64 wr_id, struct rk_sge sge, u64 remote_addr,
	       u32 rkey);
int post_receive(struct endpoint *ep, u64 wr_id);
int register_fast(struct endpoint *ep, struct rk_send *pages);
int invalidate(struct endpoint *ep, u32 stag);

/* memory.c */
int transfer(struct endpoint *from, struct endpoint *to, size_t piece);
int write_in_pieces(struct pair *pair);
int read_back(struct pair *pair);
int send_to_receive(struct pair *pair);
int fast_registration(struct pair *pair);
int write_beyond_region(struct pair *pair);
int wrong_crc(struct pair *pair);

/* pages.c */
int scattered_pages(struct pair *pair);
int page_lists(struct pair *pair);

/* limits.c */
int flush_in_steps(struct pair *pair);
int hold_time_limit(struct pair *pair);
int no_first_fpdu(struct pair *pair);
int stream_restart(struct pair *pair);

/* stream.c */
int over_tcp_open(struct pair *pair);
void over_tcp_close(struct pair *pair);
int over_tcp_writes(struct pair *pair);
int over_tcp_reads(struct pair *pair);
int over_tcp_ping_pong(struct pair *pair);
int over_tcp_held(struct pair *pair);
int over_tcp_end(struct pair *pair);

#endif

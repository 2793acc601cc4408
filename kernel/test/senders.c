// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Tests of src/send.c: several processors post at the same time, and one of them must send. If none
 * does, a message is lost, and the test hangs until its time limit.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/random.h>
#include <linux/sched/task.h>

#include "client.h"

/*
 * In a round, each poster posts one message. There is no other traffic, which would make a
 * processor send a forgotten message after all.
 */
#define ROUNDS 2000
#define POSTERS 2
/*
 * In microseconds: a round starts AHEAD after it was announced, and each poster then waits for a
 * random time below JITTER. So one post may coincide with any step of the other.
 */
#define AHEAD 100
#define JITTER 40

/* Number of the announced round, and its start time. */
struct round {
	atomic_t number;
	ktime_t start;
};

struct poster {
	struct endpoint *endpoint;
	struct round *round;
	bool failed;
};

static int post_in_rounds(void *data)
{
	struct poster *poster = data;
	int i;

	for (i = 1; i <= ROUNDS; i++) {
		while (atomic_read_acquire(&poster->round->number) < i) {
			if (kthread_should_stop())
				return 0;
			usleep_range(10, 30);
		}
		while (ktime_before(ktime_get(), poster->round->start))
			cpu_relax();
		udelay(get_random_u32_below(JITTER));
		if (post_send(poster->endpoint, i, 0, 64, 0))
			WRITE_ONCE(poster->failed, true);
	}
	return 0;
}

/* Polls and counts completions, and replaces each receive that has completed. */
static int take(struct endpoint *ep, int *sent, int *received)
{
	struct ib_wc wc;

	while (ib_poll_cq(ep->cq, 1, &wc)) {
		EXPECT(wc.status == IB_WC_SUCCESS);
		if (wc.opcode == IB_WC_RECV) {
			EXPECT(!post_receive(ep, 1, 4096, 64));
			++*received;
		} else {
			++*sent;
		}
	}
	return 0;
}

/* Announces each round after all messages of the previous round have arrived. */
static int lead_rounds(struct pair *pair, const struct poster *posters, struct round *round)
{
	unsigned long limit = jiffies + PATIENCE;
	int sent = 0, received = 0;

	for (;;) {
		EXPECT(time_before(jiffies, limit));
		EXPECT(!READ_ONCE(posters[0].failed) && !READ_ONCE(posters[1].failed));
		EXPECT(!take(&pair->a, &sent, &received));
		EXPECT(!take(&pair->b, &sent, &received));
		if (sent == atomic_read(&round->number) * POSTERS && received == sent) {
			if (sent == ROUNDS * POSTERS)
				return 0;
			round->start = ktime_add_us(ktime_get(), AHEAD);
			atomic_inc_return_release(&round->number);
		}
		usleep_range(20, 40);
	}
}

static int two_posters(struct pair *pair, struct endpoint *first, struct endpoint *second)
{
	struct round round = {};
	struct poster posters[POSTERS] = {
		{ .endpoint = first, .round = &round },
		{ .endpoint = second, .round = &round },
	};
	struct task_struct *tasks[POSTERS];
	int i, result;

	for (i = 0; i < 2 * POSTERS; i++) {
		EXPECT(!post_receive(&pair->a, 1, 4096, 64));
		EXPECT(!post_receive(&pair->b, 1, 4096, 64));
	}
	for (i = 0; i < POSTERS; i++) {
		tasks[i] = kthread_create(post_in_rounds, &posters[i], "poster/%d", i);
		if (IS_ERR(tasks[i]))
			break;
		get_task_struct(tasks[i]);
		kthread_bind(tasks[i], i % num_online_cpus());
		wake_up_process(tasks[i]);
	}
	result = i < POSTERS ? -ENOMEM : lead_rounds(pair, posters, &round);
	while (i--) {
		kthread_stop(tasks[i]);
		put_task_struct(tasks[i]);
	}
	return result;
}

/* One processor posts while another one sends for the same queue pair. */
static int while_sending(struct pair *pair)
{
	return two_posters(pair, &pair->a, &pair->a);
}

/* One processor posts while its queue pair receives. */
static int while_receiving(struct pair *pair)
{
	return two_posters(pair, &pair->a, &pair->b);
}

/*
 * This number of messages at a time makes the completion queue crowded. A work item then sends the
 * client's requests.
 */
#define BURST 8

/* a sends a burst of messages; b polls them after one call of its handler, and sends them back. */
static int answer_burst(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	int i, calls = atomic_read(&b->calls);

	for (i = 0; i < BURST; i++) {
		EXPECT(!post_receive(a, i, 32768 + i * 64, 64));
		EXPECT(!post_receive(b, i, i * 64, 64));
	}
	memset(b->buffer, 0, BURST * 64);
	memset(a->buffer + 32768, 0, BURST * 64);
	get_random_bytes(a->buffer, BURST * 64);
	EXPECT(!ib_req_notify_cq(b->cq, IB_CQ_NEXT_COMP));
	for (i = 0; i < BURST; i++)
		EXPECT(!post_send(a, i, i * 64, 64, 0));
	for (i = 0; i < BURST; i++)
		EXPECT(!expect(a, i, IB_WC_SEND));
	EXPECT(!await_calls(b, calls + 1));
	for (i = 0; i < BURST; i++)
		EXPECT(!expect(b, i, IB_WC_RECV));
	for (i = 0; i < BURST; i++)
		EXPECT(!post_send(b, i, i * 64, 64, 0));
	for (i = 0; i < BURST; i++)
		EXPECT(!expect(b, i, IB_WC_SEND));
	for (i = 0; i < BURST; i++)
		EXPECT(!expect(a, i, IB_WC_RECV));
	EXPECT(!memcmp(a->buffer, a->buffer + 32768, BURST * 64));
	return 0;
}

static int crowded(struct pair *pair)
{
	int i;

	for (i = 0; i < 200; i++)
		EXPECT(!answer_burst(pair));
	return 0;
}

const struct test sender_tests[] = {
	{ "post while another processor sends", while_sending },
	{ "post while another processor receives", while_receiving },
	{ "replies to bursts of messages", crowded },
};

const int sender_test_count = ARRAY_SIZE(sender_tests);

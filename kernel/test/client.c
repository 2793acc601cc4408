// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A kernel client: two ends on one device, connected by rdma_cm. Like the module that tests the
 * engine, it runs its tests when it is loaded, prints their results, and never stays loaded. A case
 * of `cargo xtask kernel test` loads it after the device's module.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/delay.h>
#include <linux/inet.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "client.h"

#define REQUESTS 32
#define PORT 7400
#define PRIVATE "who calls"

static char *address = "10.0.2.15";
module_param(address, charp, 0);
MODULE_PARM_DESC(address, "IPv4 address of the device");

/* ---- two ends ---- */

static void completed(struct ib_cq *cq, void *context)
{
	struct end *end = context;

	WRITE_ONCE(end->processor, raw_smp_processor_id());
	smp_mb__before_atomic();
	atomic_inc(&end->calls);
}

static int cm_event(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct end *end = id->context;

	/* The listener's context is the end that gets the connection. */
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		if (strncmp(event->param.conn.private_data, PRIVATE, sizeof(PRIVATE)))
			return -EINVAL;
		end->id = id;
	}
	end->event = event->event;
	complete(&end->happened);
	return 0;
}

int await(struct end *end, enum rdma_cm_event_type event)
{
	EXPECT(wait_for_completion_timeout(&end->happened, PATIENCE));
	if (end->event != event)
		pr_err("got %s\n", rdma_event_msg(end->event));
	EXPECT(end->event == event);
	return 0;
}

static int make_objects(struct end *end, bool srq)
{
	struct ib_device *device = end->id->device;
	struct ib_cq_init_attr cq = { .cqe = 4 * REQUESTS, .comp_vector = VECTOR };
	struct ib_srq_init_attr shared = { .attr.max_wr = REQUESTS, .attr.max_sge = 2 };
	struct ib_qp_init_attr qp = {
		.cap = {
			.max_send_wr = REQUESTS,
			.max_recv_wr = REQUESTS,
			.max_send_sge = 2,
			.max_recv_sge = 2,
			.max_inline_data = 64,
		},
		.qp_type = IB_QPT_RC,
		.sq_sig_type = IB_SIGNAL_REQ_WR,
	};

	end->pd = ib_alloc_pd(device, 0);
	EXPECT(!IS_ERR(end->pd));
	end->cq = ib_create_cq(device, completed, NULL, end, &cq);
	EXPECT(!IS_ERR(end->cq));
	end->mr = ib_alloc_mr(end->pd, IB_MR_TYPE_MEM_REG, BUFFER / PAGE_SIZE);
	EXPECT(!IS_ERR(end->mr));
	if (srq) {
		end->srq = ib_create_srq(end->pd, &shared);
		EXPECT(!IS_ERR(end->srq));
	}
	qp.send_cq = qp.recv_cq = end->cq;
	qp.srq = end->srq;
	return rdma_create_qp(end->id, end->pd, &qp);
}

static int connect(struct pair *pair, bool srq)
{
	struct rdma_conn_param param = {
		.private_data = PRIVATE,
		.private_data_len = sizeof(PRIVATE),
		.responder_resources = 4,
		.initiator_depth = 4,
	};
	struct sockaddr_in at = {
		.sin_family = AF_INET,
		.sin_port = htons(PORT),
		.sin_addr.s_addr = in_aton(address),
	};
	int result;

	pair->listener = rdma_create_id(&init_net, cm_event, &pair->b, RDMA_PS_TCP, IB_QPT_RC);
	EXPECT(!IS_ERR(pair->listener));
	EXPECT(!rdma_bind_addr(pair->listener, (struct sockaddr *)&at));
	EXPECT(!rdma_listen(pair->listener, 4));
	pair->a.id = rdma_create_id(&init_net, cm_event, &pair->a, RDMA_PS_TCP, IB_QPT_RC);
	EXPECT(!IS_ERR(pair->a.id));
	EXPECT(!rdma_resolve_addr(pair->a.id, NULL, (struct sockaddr *)&at, 2000));
	EXPECT(!await(&pair->a, RDMA_CM_EVENT_ADDR_RESOLVED));
	EXPECT(!rdma_resolve_route(pair->a.id, 2000));
	EXPECT(!await(&pair->a, RDMA_CM_EVENT_ROUTE_RESOLVED));
	EXPECT(!make_objects(&pair->a, false));
	EXPECT(!rdma_connect(pair->a.id, &param));
	EXPECT(!await(&pair->b, RDMA_CM_EVENT_CONNECT_REQUEST));
	EXPECT(!make_objects(&pair->b, srq));
	rdma_lock_handler(pair->b.id);
	result = rdma_accept(pair->b.id, &param);
	rdma_unlock_handler(pair->b.id);
	EXPECT(!result);
	EXPECT(!await(&pair->b, RDMA_CM_EVENT_ESTABLISHED));
	return await(&pair->a, RDMA_CM_EVENT_ESTABLISHED);
}

static void free_end(struct end *end)
{
	if (IS_ERR_OR_NULL(end->id))
		return;
	if (end->id->qp) {
		rdma_disconnect(end->id);
		rdma_destroy_qp(end->id);
	}
	if (!IS_ERR_OR_NULL(end->mr))
		ib_dereg_mr(end->mr);
	if (!IS_ERR_OR_NULL(end->srq))
		ib_destroy_srq(end->srq);
	if (!IS_ERR_OR_NULL(end->cq))
		ib_destroy_cq(end->cq);
	if (!IS_ERR_OR_NULL(end->pd))
		ib_dealloc_pd(end->pd);
	rdma_destroy_id(end->id);
}

/* ---- requests ---- */

struct ib_sge part(const struct end *end, u32 from, u32 len)
{
	return (struct ib_sge){
		.addr = (uintptr_t)end->buffer + from,
		.length = len,
		.lkey = end->pd->local_dma_lkey,
	};
}

int post_receive(struct end *end, u64 wr_id, u32 from, u32 len)
{
	struct ib_sge sge = part(end, from, len);
	struct ib_recv_wr request = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };

	return end->srq ? ib_post_srq_recv(end->srq, &request, NULL) :
			  ib_post_recv(end->id->qp, &request, NULL);
}

int post_send(struct end *end, u64 wr_id, u32 from, u32 len, int flags)
{
	struct ib_sge sge = part(end, from, len);
	struct ib_send_wr request = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED | flags,
	};

	return ib_post_send(end->id->qp, &request, NULL);
}

int post_rdma(struct end *end, enum ib_wr_opcode opcode, u64 wr_id, struct ib_sge sge,
		     u64 remote_addr, u32 rkey)
{
	struct ib_rdma_wr request = {
		.wr = {
			.wr_id = wr_id,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = opcode,
			.send_flags = IB_SEND_SIGNALED,
		},
		.remote_addr = remote_addr,
		.rkey = rkey,
	};

	if (opcode == IB_WR_RDMA_READ_WITH_INV)
		request.wr.ex.invalidate_rkey = sge.lkey;
	return ib_post_send(end->id->qp, &request.wr, NULL);
}

int next(struct end *end, struct ib_wc *wc)
{
	unsigned long limit = jiffies + PATIENCE;

	while (!ib_poll_cq(end->cq, 1, wc)) {
		EXPECT(time_before(jiffies, limit));
		usleep_range(100, 200);
	}
	return 0;
}

int expect(struct end *end, u64 wr_id, enum ib_wc_opcode opcode)
{
	struct ib_wc wc;

	EXPECT(!next(end, &wc));
	if (wc.status != IB_WC_SUCCESS || wc.wr_id != wr_id || wc.opcode != opcode)
		pr_err("request %llu instead of %llu, opcode %d instead of %d: %s\
		", wc.wr_id,
		       wr_id, wc.opcode, opcode, ib_wc_status_msg(wc.status));
	EXPECT(wc.status == IB_WC_SUCCESS && wc.wr_id == wr_id && wc.opcode == opcode);
	EXPECT(wc.qp == end->id->qp);
	return 0;
}

/* Waits until the completion handler has been called `calls` times in total, and no more. */
int await_calls(const struct end *end, int calls)
{
	unsigned long limit = jiffies + PATIENCE;

	while (atomic_read(&end->calls) < calls && time_before(jiffies, limit))
		usleep_range(100, 200);
	EXPECT(atomic_read(&end->calls) == calls);
	return 0;
}

/* ---- the run ---- */

static int run(const struct test *test)
{
	struct pair *pair = kzalloc(sizeof(*pair), GFP_KERNEL);
	int error = -ENOMEM;

	if (!pair)
		return error;
	init_completion(&pair->a.happened);
	init_completion(&pair->b.happened);
	pair->a.buffer = kzalloc(BUFFER, GFP_KERNEL);
	pair->b.buffer = kzalloc(BUFFER, GFP_KERNEL);
	if (pair->a.buffer && pair->b.buffer)
		error = connect(pair, test->srq);
	if (!error)
		error = test->run(pair);
	free_end(&pair->a);
	free_end(&pair->b);
	if (!IS_ERR_OR_NULL(pair->listener))
		rdma_destroy_id(pair->listener);
	kfree(pair->a.buffer);
	kfree(pair->b.buffer);
	kfree(pair);
	return error;
}

static int run_all(const struct test *list, int count)
{
	int i, failed = 0;

	for (i = 0; i < count; i++) {
		int error = run(&list[i]);

		if (error)
			pr_err("FAILED %s: %d\n", list[i].name, error);
		else
			pr_info("passed %s\n", list[i].name);
		failed += !!error;
	}
	return failed;
}

static int __init client_test_init(void)
{
	int failed = run_all(tests, test_count) + run_all(sender_tests, sender_test_count);

	pr_info("%d tests, %d failed\n", test_count + sender_test_count, failed);
	return -ECANCELED;
}

module_init(client_test_init);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Tests of the verbs of iwarp_rnic for clients in the kernel");

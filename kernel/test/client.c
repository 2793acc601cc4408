// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A kernel module that tests the driver as a kernel client: two endpoints on one device, connected
 * by rdma_cm. Loading the module runs all tests and prints the results. Loading always fails at the
 * end, so the module never stays loaded. `cargo xtask kernel test --only client` loads it after the
 * driver.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/delay.h>
#include <linux/inet.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "client.h"

#define REQUESTS 32
#define PORT 7400
#define PRIVATE "private data"

static char *address = "10.0.2.15";
module_param(address, charp, 0);
MODULE_PARM_DESC(address, "IPv4 address of the device that is tested");

/* ---- two endpoints ---- */

static void completed(struct ib_cq *cq, void *context)
{
	struct endpoint *ep = context;

	WRITE_ONCE(ep->processor, raw_smp_processor_id());
	smp_mb__before_atomic();
	atomic_inc(&ep->calls);
}

static int cm_event(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct endpoint *ep = id->context;

	/* The listener's context is the endpoint that accepts the connection. */
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		if (strncmp(event->param.conn.private_data, PRIVATE, sizeof(PRIVATE)))
			return -EINVAL;
		ep->id = id;
	}
	ep->event = event->event;
	complete(&ep->event_received);
	return 0;
}

int await(struct endpoint *ep, enum rdma_cm_event_type event)
{
	EXPECT(wait_for_completion_timeout(&ep->event_received, PATIENCE));
	if (ep->event != event)
		pr_err("expected %s, got %s\n", rdma_event_msg(event), rdma_event_msg(ep->event));
	EXPECT(ep->event == event);
	return 0;
}

static int create_objects(struct endpoint *ep, bool srq)
{
	struct ib_device *device = ep->id->device;
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

	ep->pd = ib_alloc_pd(device, 0);
	EXPECT(!IS_ERR(ep->pd));
	ep->cq = ib_create_cq(device, completed, NULL, ep, &cq);
	EXPECT(!IS_ERR(ep->cq));
	ep->mr = ib_alloc_mr(ep->pd, IB_MR_TYPE_MEM_REG, BUFFER / PAGE_SIZE);
	EXPECT(!IS_ERR(ep->mr));
	if (srq) {
		ep->srq = ib_create_srq(ep->pd, &shared);
		EXPECT(!IS_ERR(ep->srq));
	}
	qp.send_cq = qp.recv_cq = ep->cq;
	qp.srq = ep->srq;
	return rdma_create_qp(ep->id, ep->pd, &qp);
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
	EXPECT(!create_objects(&pair->a, false));
	EXPECT(!rdma_connect(pair->a.id, &param));
	EXPECT(!await(&pair->b, RDMA_CM_EVENT_CONNECT_REQUEST));
	EXPECT(!create_objects(&pair->b, srq));
	rdma_lock_handler(pair->b.id);
	result = rdma_accept(pair->b.id, &param);
	rdma_unlock_handler(pair->b.id);
	EXPECT(!result);
	EXPECT(!await(&pair->b, RDMA_CM_EVENT_ESTABLISHED));
	return await(&pair->a, RDMA_CM_EVENT_ESTABLISHED);
}

static void free_endpoint(struct endpoint *ep)
{
	if (IS_ERR_OR_NULL(ep->id))
		return;
	if (ep->id->qp) {
		rdma_disconnect(ep->id);
		rdma_destroy_qp(ep->id);
	}
	if (!IS_ERR_OR_NULL(ep->mr))
		ib_dereg_mr(ep->mr);
	if (!IS_ERR_OR_NULL(ep->srq))
		ib_destroy_srq(ep->srq);
	if (!IS_ERR_OR_NULL(ep->cq))
		ib_destroy_cq(ep->cq);
	if (!IS_ERR_OR_NULL(ep->pd))
		ib_dealloc_pd(ep->pd);
	rdma_destroy_id(ep->id);
}

/* ---- requests ---- */

struct ib_sge part(const struct endpoint *ep, u32 from, u32 len)
{
	return (struct ib_sge){
		.addr = (uintptr_t)ep->buffer + from,
		.length = len,
		.lkey = ep->pd->local_dma_lkey,
	};
}

int post_receive(struct endpoint *ep, u64 wr_id, u32 from, u32 len)
{
	struct ib_sge sge = part(ep, from, len);
	struct ib_recv_wr request = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 };

	return ep->srq ? ib_post_srq_recv(ep->srq, &request, NULL) :
			 ib_post_recv(ep->id->qp, &request, NULL);
}

int post_send(struct endpoint *ep, u64 wr_id, u32 from, u32 len, int flags)
{
	struct ib_sge sge = part(ep, from, len);
	struct ib_send_wr request = {
		.wr_id = wr_id,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED | flags,
	};

	return ib_post_send(ep->id->qp, &request, NULL);
}

int post_rdma(struct endpoint *ep, enum ib_wr_opcode opcode, u64 wr_id, struct ib_sge sge,
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
	return ib_post_send(ep->id->qp, &request.wr, NULL);
}

int next_completion(struct endpoint *ep, struct ib_wc *wc)
{
	unsigned long limit = jiffies + PATIENCE;

	while (!ib_poll_cq(ep->cq, 1, wc)) {
		EXPECT(time_before(jiffies, limit));
		usleep_range(100, 200);
	}
	return 0;
}

int expect(struct endpoint *ep, u64 wr_id, enum ib_wc_opcode opcode)
{
	struct ib_wc wc;

	EXPECT(!next_completion(ep, &wc));
	if (wc.status != IB_WC_SUCCESS || wc.wr_id != wr_id || wc.opcode != opcode)
		pr_err("got wr_id %llu, expected %llu; got opcode %d, expected %d; status: %s\n",
		       wc.wr_id, wr_id, wc.opcode, opcode, ib_wc_status_msg(wc.status));
	EXPECT(wc.status == IB_WC_SUCCESS && wc.wr_id == wr_id && wc.opcode == opcode);
	EXPECT(wc.qp == ep->id->qp);
	return 0;
}

/* Waits until the completion handler was called `calls` times in total. Fails after more calls. */
int await_calls(const struct endpoint *ep, int calls)
{
	unsigned long limit = jiffies + PATIENCE;

	while (atomic_read(&ep->calls) < calls && time_before(jiffies, limit))
		usleep_range(100, 200);
	EXPECT(atomic_read(&ep->calls) == calls);
	return 0;
}

/* ---- the run ---- */

static int run(const struct test *test)
{
	struct pair *pair = kzalloc(sizeof(*pair), GFP_KERNEL);
	int error = -ENOMEM;

	if (!pair)
		return error;
	init_completion(&pair->a.event_received);
	init_completion(&pair->b.event_received);
	pair->a.buffer = kzalloc(BUFFER, GFP_KERNEL);
	pair->b.buffer = kzalloc(BUFFER, GFP_KERNEL);
	if (pair->a.buffer && pair->b.buffer)
		error = connect(pair, test->srq);
	if (!error)
		error = test->run(pair);
	free_endpoint(&pair->a);
	free_endpoint(&pair->b);
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

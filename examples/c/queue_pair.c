/* Lesson 3: two queue pairs of one process, connected to each other, through all their states.
 *
 * usage: queue_pair [GID-INDEX]      (on a RoCE card, `show_gids` lists the indexes) */
#include "lesson.h"

static struct ibv_context *context;
static int gid_index;

static const char *state_of(struct ibv_qp *qp)
{
	static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	check(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
	return names[attr.qp_state];
}

static void show(const char *what, struct ibv_qp *a, struct ibv_qp *b)
{
	printf("%-20s a is in %-5s  b is in %s\n", what, state_of(a), state_of(b));
}

static void init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};

	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS), "to INIT");
}

/* Tells a queue pair who its peer is. It can receive from now on. */
static void ready_to_receive(struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = {.is_global = 1, .port_num = 1,
			    .grh = {.sgid_index = gid_index, .hop_limit = 1}},
	};

	check(ibv_query_gid(context, 1, gid_index, &attr.ah_attr.grh.dgid), "ibv_query_gid");
	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			    IBV_QP_MIN_RNR_TIMER), "to RTR");
}

static void ready_to_send(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				   .rnr_retry = 7, .max_rd_atomic = 1};

	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

int main(int argc, char **argv)
{
	struct ibv_device **list = created(ibv_get_device_list(NULL), "ibv_get_device_list");
	char text[32] = "hello", heard[32] = "";
	struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
	struct ibv_wc wc;

	gid_index = argc > 1 ? atoi(argv[1]) : 0;
	if (!list[0]) {
		fprintf(stderr, "there are no RDMA devices\n");
		return 1;
	}
	context = created(ibv_open_device(list[0]), "ibv_open_device");
	struct ibv_pd *pd = created(ibv_alloc_pd(context), "ibv_alloc_pd");
	struct ibv_cq *cq = created(ibv_create_cq(context, 16, NULL, NULL, 0), "ibv_create_cq");
	struct ibv_mr *out = created(ibv_reg_mr(pd, text, 32, 0), "ibv_reg_mr");
	struct ibv_mr *in = created(ibv_reg_mr(pd, heard, 32, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct ibv_qp *a = created(ibv_create_qp(pd, &attr), "ibv_create_qp");
	struct ibv_qp *b = created(ibv_create_qp(pd, &attr), "ibv_create_qp");
	struct ibv_sge from = {(uintptr_t)text, 32, out->lkey}, to = {(uintptr_t)heard, 32, in->lkey};
	struct ibv_send_wr send = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND};
	struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = &to, .num_sge = 1}, *bad;
	struct ibv_send_wr *bad_send;

	show("created:", a, b);
	init(a), init(b);
	show("may post receives:", a, b);
	check(ibv_post_recv(b, &receive, &bad), "ibv_post_recv");
	ready_to_receive(a, b), ready_to_receive(b, a);
	show("know their peers:", a, b);
	ready_to_send(a), ready_to_send(b);
	show("may send:", a, b);
	check(ibv_post_send(a, &send, &bad_send), "ibv_post_send");
	completion(cq), completion(cq); /* of the Send and of the receive, in any order */
	printf("b has received '%s'\n", heard);

	check(ibv_post_recv(b, &receive, &bad), "ibv_post_recv");
	check(ibv_modify_qp(b, &error, IBV_QP_STATE), "to ERR");
	show("given up:", a, b);
	while (ibv_poll_cq(cq, 1, &wc) == 0)
		;
	printf("the posted receive: %s\n", ibv_wc_status_str(wc.status));
	ibv_destroy_qp(a), ibv_destroy_qp(b), ibv_dereg_mr(in), ibv_dereg_mr(out);
	ibv_destroy_cq(cq), ibv_dealloc_pd(pd), ibv_close_device(context);
	return 0;
}

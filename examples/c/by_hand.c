/* Lesson 7: connects without rdma_cm. The two programs exchange over TCP what their queue pairs
 * must know: a number (QPN) and an address (GID). Then each sends a message over RDMA.
 *
 * usage: by_hand DEVICE GID-INDEX          waits on TCP port 7472
 *        by_hand DEVICE GID-INDEX HOST     connects to HOST */
#include "lesson.h"
#include <arpa/inet.h>
#include <netdb.h>
#include <unistd.h>

#define PORT "7472"

struct number {
	uint32_t qpn; /* in network byte order */
	union ibv_gid gid;
};

/* Returns a TCP connection: to `host`, or from the first client. */
static int tcp(const char *host)
{
	struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM,
				 .ai_flags = AI_PASSIVE}, *to;
	int error = getaddrinfo(host, PORT, &hints, &to), on = 1, fd;

	if (error) {
		fprintf(stderr, "%s: %s\n", host, gai_strerror(error));
		exit(1);
	}
	fd = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (host) {
		check(connect(fd, to->ai_addr, to->ai_addrlen), "connect");
		return fd;
	}
	check(bind(fd, to->ai_addr, to->ai_addrlen), "bind");
	check(listen(fd, 1), "listen");
	fd = accept(fd, NULL, NULL);
	check(fd < 0 ? -1 : 0, "accept");
	return fd;
}

/* Sends `own` and returns the peer's; both ends do the same. */
static struct number exchange(int fd, struct number own)
{
	struct number peer;

	check(write(fd, &own, sizeof(own)) == sizeof(own) ? 0 : -1, "write");
	check(recv(fd, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer) ? 0 : -1, "recv");
	return peer;
}

static void connect_to(struct ibv_qp *qp, int gid_index, struct number peer)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = ntohl(peer.qpn), .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = peer.gid,
			    .sgid_index = gid_index, .hop_limit = 64}}};
	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "to RTR");
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				    .rnr_retry = 7, .max_rd_atomic = 1};
	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
		IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

static struct ibv_context *opened(const char *name)
{
	struct ibv_device **list = created(ibv_get_device_list(NULL), "ibv_get_device_list");

	while (*list && strcmp(ibv_get_device_name(*list), name) != 0)
		list++;
	errno = ENODEV;
	return created(*list ? ibv_open_device(*list) : NULL, name);
}

int main(int argc, char **argv)
{
	char text[64] = "", heard[64] = "";
	struct ibv_recv_wr *bad_recv;
	struct ibv_send_wr *bad_send;

	check(argc < 3 ? EINVAL : 0, "usage: by_hand DEVICE GID-INDEX [HOST]");
	struct ibv_context *context = opened(argv[1]);
	struct ibv_pd *pd = created(ibv_alloc_pd(context), "ibv_alloc_pd");
	struct ibv_cq *cq = created(ibv_create_cq(context, 2, NULL, NULL, 0), "ibv_create_cq");
	struct ibv_mr *in = created(ibv_reg_mr(pd, heard, 64, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
	struct ibv_mr *out = created(ibv_reg_mr(pd, text, 64, 0), "ibv_reg_mr");
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.sq_sig_all = 1, .cap = {1, 1, 1, 1, 0}};
	struct ibv_qp *qp = created(ibv_create_qp(pd, &init), "ibv_create_qp");
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	struct ibv_sge from = {(uintptr_t)text, 64, out->lkey}, to = {(uintptr_t)heard, 64, in->lkey};
	struct ibv_recv_wr receive = {.sg_list = &to, .num_sge = 1};
	struct ibv_send_wr send = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND};
	struct number own = {.qpn = htonl(qp->qp_num)};

	check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS), "to INIT");
	check(ibv_post_recv(qp, &receive, &bad_recv), "ibv_post_recv");
	check(ibv_query_gid(context, 1, atoi(argv[2]), &own.gid), "ibv_query_gid");
	int fd = tcp(argc > 3 ? argv[3] : NULL);
	struct number peer = exchange(fd, own);
	printf("queue pair 0x%06x, the peer's is 0x%06x\n", qp->qp_num, ntohl(peer.qpn));
	connect_to(qp, atoi(argv[2]), peer);
	exchange(fd, own); /* Waits until the peer's queue pair is ready, too. */

	sprintf(text, "hello from the %s", argc > 3 ? "client" : "server");
	check(ibv_post_send(qp, &send, &bad_send), "ibv_post_send");
	completion(cq), completion(cq); /* of the Send and of the receive */
	printf("received '%s'\n", heard);
	exchange(fd, own); /* Neither ends before the other has received. */
	return 0;
}

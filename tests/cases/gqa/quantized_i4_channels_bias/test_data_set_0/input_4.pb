B
past_valueJxU.ÈF[8R3U\­”½½G×ƒƒ%ŠÉŽ>·B×.;T§ÉÍ“ŒxnØTTCSDFÄ“,=,…È›‹•%¼T%žY¸Œ*Ü´¹¾MytÝ´–ŠË£Bu{"è’Êî.ˆ¼8=žšÖ¸Xbf«ØyNI¼3Þ‰›²½®‚VîŽÆ8ÛfzM